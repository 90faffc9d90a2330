"""Every command and every piece of Python in README.md and docs/ runs, in the order of its page.

Each page has a folder of its own with a small corpus; runs that it speaks of but does not train are there already, tiny
ones under those names. Lines run in a shell, as printed. What would take long gets the flags of SHORTER at its end, the
studio a port that is free; `pip` does nothing, `make TARGET` only says what it would do. Nothing else is changed. A
comment before a block leaves it out:

    <!-- needs: gpu -->  (or hub, cluster, judge, browser)      <!-- not run: why -->

and one says under which name it is saved instead of being run: <!-- file: name.py -->.
"""

import dataclasses
import fcntl
import json
import os
import random
import re
import shutil
import socket
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from markdown_it import MarkdownIt

from ..zygote import home

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
WORDS = ("cdlm", "python", "python3", "make", "curl", "pip", "torchrun", "sbatch", "cat", "pytest", "export", "grep")
NEEDS = ("gpu", "hub", "cluster", "judge", "browser")

QUICK = "--steps 6 --batch-size 4 --log-every 3 --save-every 3 --valid-every 6 --valid-batches 1"
QUICK += " --valid-samples 1 --valid-sample-steps 2"
SHORTER = [
    ("train tiny-*", QUICK),
    ("train small-*", f"{QUICK} --device cpu --dtype float32 --no-compile --seq-length 64"),
    ("train small-*", "--network.hidden-size 32 --network.num-layers 1 --network.num-heads 1 --network.cond-dim 8"),
    ("sample*", "--num-samples 1"),
    ("sample mdlm --[so]*", "--max-length 32"),
    ("moons*", "--train-steps 3 --num-samples 200 --bins 8 --sampling-steps 1 2 --batch-size 32"),
    ("methods --run *", "--run tiny --seq-length 16 --vocab-size 200"),
    ("eval *", "--num-samples 4"),
    ("eval *--temperature 1 0.9 0.8 0.7*", "--temperature 1 0.8"),
    ("eval *--steps 8 32 128*", "--steps 2 4 --temperature 1 0.9 --top-p 0.9"),
    ("eval *--judge smollm2*", "--judge runs/small-ar"),
    ("eval *--judge gemma3-270m*", "--judge runs/small-ar"),
    ("eval --protocol distributional", "--judge none --num-samples 8 --steps 2 --order random --max-length 64"),
    ("eval --protocol distributional", "--temperature 1 --log-frequency-penalty 0"),
    ("eval *--likelihood-samples *", "--likelihood-samples 2"),
]
"""Commands, without their first word, and what is added at their end; of a flag given twice the last one counts."""

STAND_INS = {f"runs/{size}{method}": method for size in ("", "tiny-", "small-") for method in ("mdlm", "mcdlm", "ar")}
"""Runs that a page may speak of without training them, and the method of the tiny run in their place."""


@dataclasses.dataclass(frozen=True)
class Block:
    """A block of code on a page."""

    kind: str
    """shell, python or text."""
    text: str
    line: int
    mark: str = ""
    """The comment before it."""

    @property
    def runs(self) -> bool:
        return not self.mark.startswith(("needs:", "not run:", "file:"))


def blocks(page: Path) -> list[Block]:
    """The code of a page, in order."""
    found, mark = [], ""
    for token in MarkdownIt("commonmark").enable("table").parse(page.read_text()):
        if token.type in ("fence", "code_block"):
            language = token.info.strip()
            kind = "python" if language == "python" else "shell" if language in ("", "sh") else "text"
            found.append(Block(kind, token.content, (token.map or [0])[0] + 1, mark))
        comment = re.fullmatch(r"<!--\s*(.*?)\s*-->\s*", token.content) if token.type == "html_block" else None
        mark = comment[1] if comment else ""
    return found


def commands(block: Block) -> list[str]:
    """The commands of a block, continued lines joined; none if it holds something else (a formula, files)."""
    lines = re.sub(r"\s*\\\n\s*", " ", block.text).splitlines()
    lines = [line.strip() for line in lines]
    return [line for line in lines if line.split(" ")[0] in WORDS] if block.kind == "shell" else []


def script(page: Path) -> str:
    """A page as a shell script."""
    lines = ["set -eo pipefail", "trap 'kill $(jobs -p) 2> /dev/null || true' EXIT"]
    for block in blocks(page):
        if block.mark.startswith("file:"):
            lines += [saved(block.mark.removeprefix("file:").strip(), block.text)]
        elif block.runs and block.kind == "python":
            name = f"line{block.line}.py"
            lines += [f"echo '## {name}'", saved(name, block.text), f"python {name}"]
        elif block.runs:
            for command in commands(block):
                lines += [f"echo '## line {block.line}: {command.split(' ')[0]}'"]
                served = command.startswith("cdlm studio")
                lines += [SERVED.format(command.split("  #")[0])] if served else [f"{{ {command}\n}} || exit 1"]
    return "\n".join(lines) + "\n"


def saved(name: str, text: str) -> str:
    return f"cat > {name} <<'END-OF-FILE'\n{text}END-OF-FILE"


SERVED = """\
if [ -n "$served" ]; then kill $served; wait $served || true; fi
{} --port $PORT --device cpu > studio.log 2>&1 &
served=$!
for _ in $(seq 100); do curl -s localhost:$PORT/health > /dev/null && break; sleep 0.1; done"""


@dataclasses.dataclass(frozen=True)
class Shell:
    """A shell whose `cdlm` and `python` cost no imports."""

    bin: Path
    door: Path

    def __call__(self, text: str, folder: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        own = {"ZYGOTE": str(self.door), "SHORTER": json.dumps(SHORTER), "PORT": str(port), "MPLBACKEND": "Agg"}
        path = os.pathsep.join([str(self.bin), str(Path(sys.executable).parent), os.environ["PATH"]])
        quiet = {
            "OMP_NUM_THREADS": "1",
            "COLUMNS": "150",
            "HF_HUB_OFFLINE": "1",
            "PYTHONPATH": str(ROOT),
            "HF_HOME": str(folder / "hub"),
        }
        done = subprocess.run(
            ["bash", "-c", text.replace("localhost:8000", f"localhost:{port}")],
            cwd=folder,
            env={**os.environ, **own, **quiet, "PATH": path},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stdout[-4000:]


@pytest.fixture(scope="module")
def shell() -> Shell:
    curl = home() / "bin" / "curl"
    curl.write_text(f'#!/bin/sh\nexec {shutil.which("curl") or "curl"} -sS --fail-with-body "$@"\n')
    curl.chmod(0o755)
    if make := shutil.which("make"):
        (home() / "bin" / "make").write_text(f'#!/bin/sh\nexec {make} -n --no-print-directory -C {ROOT} "$@"\n')
    return Shell(home() / "bin", home() / "door")


def write_corpus(folder: Path) -> None:
    draw = random.Random(0)
    things, deeds = ["cat", "dog", "old man", "sea", "rain", "bird"], ["sees", "likes", "hears", "follows"]
    sentences = [f"the {draw.choice(things)} {draw.choice(deeds)} the {draw.choice(things)}." for _ in range(4000)]
    documents = [" ".join(sentences[k : k + 20]) for k in range(0, 4000, 20)]
    (folder / "corpus.txt").write_text("\n<|endoftext|>\n".join(documents))
    for name in ("texts-of-people.txt", "ptb_test.txt", "texts.txt"):
        (folder / name).write_text("\n<|endoftext|>\n".join(documents[:10]))
    (folder / "prompts.txt").write_text("the cat sees\nthe ___ likes the dog.\n")


@pytest.fixture(scope="module")
def made(shell: Shell, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A corpus, its tokens, and a tiny run of three methods: made once, whichever process comes first."""
    base = tmp_path_factory.getbasetemp()
    base = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    folder = base / "made"
    with (base / "made.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "whole").exists():
            folder.mkdir()
            write_corpus(folder)
            lines = ["cdlm prepare corpus.txt --seq-length 128 --packing plain --out data"]
            lines += [f"cdlm train tiny-{method} --data data --seq-length 128" for method in ("mdlm", "mcdlm", "ar")]
            shell("set -e\n" + "\n".join(lines), folder)
            (folder / "whole").touch()
    return folder


def furnish(folder: Path, page: Path, made: Path) -> None:
    """What the page takes for granted: the corpus, tokens unless it makes them, runs unless it trains them."""
    for path in made.glob("*.txt"):
        shutil.copyfile(path, folder / path.name)
    for name in ("docs", "README.md", "Makefile", "constraints.txt"):
        (folder / name).symlink_to(ROOT / name)
    lines = [line for block in blocks(page) if block.runs for line in commands(block)]
    code = "\n".join([*lines, *(block.text for block in blocks(page) if block.runs and block.kind == "python")])
    if not any(re.search(r"cdlm prepare .*--out data\b", line) for line in lines):
        shutil.copytree(made / "data", folder / "data")
    trained = {out for line in lines for out in re.findall(r" train .*--out (\S+)", line)}
    trained |= {f"runs/{name}" for line in lines for name in re.findall(r"cdlm train (\w[\w-]*)(?!.*--out)", line)}
    for name in (set(re.findall(r"\bruns/[\w-]+", code)) & STAND_INS.keys()) - trained:
        shutil.copytree(made / "runs" / f"tiny-{STAND_INS[name]}", folder / name)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_runs_as_it_is_printed(page: Path, shell: Shell, made: Path, tmp_path: Path) -> None:
    if not any(block.runs and (block.kind == "python" or commands(block)) for block in blocks(page)):
        pytest.skip("it has nothing to run")
    if "curl" in script(page) and not shutil.which("curl"):
        pytest.skip("there is no curl")
    furnish(tmp_path, page, made)
    shell(script(page), tmp_path)


@pytest.mark.parametrize(
    "text",
    [
        "    cdlm methods --nothing",
        "    cdlm sample nowhere && cdlm --help",
        "    cdlm sample nowhere | cat",
        "```python\n1 / 0\n```",
        "    cdlm studio nowhere\n    curl localhost:8000/health",
        pytest.param("    make nothing", marks=pytest.mark.skipif(not shutil.which("make"), reason="there is no make")),
    ],
)
def test_a_page_that_is_wrong_fails(text: str, shell: Shell, tmp_path: Path) -> None:
    (tmp_path / "page.md").write_text(f"# Page\n\n{text}\n")
    with pytest.raises(AssertionError):
        shell(script(tmp_path / "page.md").replace("seq 100", "seq 3"), tmp_path)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_line_is_forgotten(page: Path) -> None:
    """In a block of commands every line is one; marks are known; languages are known."""
    for block in blocks(page):
        where = f"{page.name}, line {block.line}"
        kind, _, rest = block.mark.partition(":")
        if block.mark:
            assert kind in ("needs", "not run", "file"), f"{where}: {block.mark}"
            assert rest.strip() in NEEDS if kind == "needs" else rest.strip(), f"{where}: {block.mark}"
        lines = [line for line in re.sub(r"\\\n", " ", block.text).splitlines() if line.strip()]
        if commands(block):
            odd = [line for line in lines if line.split()[0] not in WORDS and not line.strip().startswith("#")]
            assert not odd, f"{where}: {odd}"


def spans(page: Path) -> list[str]:
    """What stands between backquotes, and every command of a block."""
    found = []
    for token in MarkdownIt("commonmark").enable("table").parse(page.read_text()):
        found += [child.content for child in token.children or [] if child.type == "code_inline"]
    return found + [line for block in blocks(page) for line in commands(block)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_targets_and_extras_exist(page: Path) -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M))
    extras = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"])
    for line in spans(page):
        for target in re.findall(r"(?:^|\s)make ([a-z]+)", line):
            assert target in targets, line
        for names in re.findall(r"(?:cdlm|\.)\[([\w,-]+)\]", line):
            assert set(names.split(",")) <= extras, line


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_in_the_text_exist(page: Path) -> None:
    """Also those that are only mentioned: the command is there, and its flags are."""
    from cdlm.cli.convert import ConvertConfig
    from cdlm.cli.main import COMMANDS
    from cdlm.cli.methods import MethodsConfig
    from cdlm.cli.plot import PlotConfig
    from cdlm.cli.pull import PullConfig
    from cdlm.cli.push import PushConfig
    from cdlm.cli.sample import SampleConfig
    from cdlm.cli.sudoku import SudokuConfig
    from cdlm.data.config import PrepareConfig
    from cdlm.eval.config import EvalConfig, MoonsConfig, ReportConfig
    from cdlm.model.config import NetworkConfig
    from cdlm.studio.config import StudioConfig
    from cdlm.train.config import TrainConfig

    kinds: dict[str, type] = {
        "train": TrainConfig, "prepare": PrepareConfig, "eval": EvalConfig, "pull": PullConfig,
        "push": PushConfig, "moons": MoonsConfig, "report": ReportConfig, "methods": MethodsConfig, "plot": PlotConfig,
        "studio": StudioConfig, "sample": SampleConfig, "convert": ConvertConfig,
        "sudoku": SudokuConfig,
    }  # fmt: skip
    for line in spans(page):
        for command, rest in re.findall(r"(?:^|\s)cdlm ([a-z]+)([^|&#]*)", line):
            assert command in COMMANDS, line
            fields = dataclasses.fields(kinds[command]) if command in kinds else ()
            names = {field.name.replace("_", "-") for field in fields}
            more = {f"network.{field.name.replace('_', '-')}" for field in dataclasses.fields(NetworkConfig)}
            known = names | {"help"} | ({"resume"} | more if command == "train" else set())
            for flag in re.findall(r"(?:^|\s)--(?:no-)?([\w.-]+)", rest):
                assert flag in known, f"{line}: --{flag}"
