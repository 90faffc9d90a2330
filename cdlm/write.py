"""The command `cdlm sample`: prompts, blanks and files in, texts out, to read or as JSON."""

import contextlib
import dataclasses
import json
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any, Literal

import torch
from rich.console import Console, Group
from rich.live import Live
from rich.progress import Progress, TaskID
from rich.rule import Rule
from rich.text import Text as Line

from cdlm.devices import Device, Dtype
from cdlm.draft import HOLE, Draft, has_blanks
from cdlm.eval.diversity import entropy
from cdlm.sample import Sampling, State
from cdlm.text import MASK, Frame, Model, Text, load


@dataclasses.dataclass(frozen=True)
class SampleConfig(Sampling):
    """Write text with a model folder, a run (its newest checkpoint, also while it is training), or a hub id.

    Without --prompt, --infill, --rewrite or --input it writes from nothing.
    """

    model: str = ""
    """A model folder, the folder of a run, or an id of the model hub."""
    prompt: str | None = None
    """Continue this text."""
    infill: str | None = None
    """Fill the blanks of this text: ___ for a few tokens, [MASK] for one, [MASK:5] for five."""
    rewrite: str | None = None
    """Noise this text and denoise it again: the paper's conditional generation."""
    input: str | None = None
    """A file with a text on each line, or - for standard input: lines with blanks are filled, others continued. In a
    .jsonl file (or from -) a line may be an object with prompt, infill or rewrite."""
    num: int = 4
    """Texts to write, for each prompt if there are several."""
    length: int | None = None
    """Tokens in a text; that of training unless told otherwise."""
    width: int = 4
    """Tokens that ___ stands for."""
    noise: float = 0.5
    """For rewriting: the time to which the text is noised."""
    clamp: bool = False
    """For rewriting with a uniform model: keep the tokens that the noise left alone."""
    trim: bool = False
    """End a text at its end-of-text token."""
    seed: int = 0
    """The same seed writes the same texts."""
    batch: int = 32
    """Texts to write at once."""
    json: bool = False
    """Print one JSON object a line instead of pages to read."""
    out: Path | None = None
    """Write the JSON lines to this file as well, each as soon as it is finished."""
    watch: bool = False
    """Show the texts resolving step by step."""
    device: Device = "auto"
    """Where to compute."""
    dtype: Literal["auto", Dtype] = "auto"
    """Precision of the network: bfloat16 on a GPU and float32 elsewhere unless told otherwise."""
    compile: bool = False
    """Compile the network: a minute at first, faster texts after."""
    tokenizer: Path | None = None
    """A tokenizer.json or a folder of GPT-2's files, for a model folder that has none."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("num", "width", "batch"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name} must be at least 1; got {getattr(self, name)}")
        if self.length is not None and self.length < 2:
            raise ValueError(f"--length must be at least 2; got {self.length}")
        asked = [name for name in ("prompt", "infill", "rewrite", "input") if getattr(self, name) is not None]
        if len(asked) > 1:
            raise ValueError(f"give one of --{' and --'.join(asked)}, not both; --input takes many texts of any kind")
        if not 0 < self.noise <= 1:
            raise ValueError(f"--noise is a time in (0, 1]; got {self.noise}")
        rewriting = self.rewrite is not None or self.input is not None
        if (self.clamp or self.noise != 0.5) and not rewriting:
            raise ValueError("--noise and --clamp go with --rewrite")
        if self.length is not None and (self.infill is not None or self.rewrite is not None):
            raise ValueError("the text itself says how long it is: leave out --length")
        if self.watch and self.json:
            raise ValueError("--watch draws, --json prints data: choose one")
        if self.out is not None and self.out.exists():
            raise ValueError(f"{self.out} exists; name another --out, or remove it first")

    @property
    def how(self) -> Sampling:
        return Sampling(**{field.name: getattr(self, field.name) for field in dataclasses.fields(Sampling)})


def write_texts(config: SampleConfig, console: Console) -> list[Text]:
    """Write, print and keep; whatever stops it, finished texts are not lost."""
    if not config.model:
        raise ValueError(f"name a model: cdlm sample MODEL{_runs()}")
    sources = list(_sources(config))
    model = load(config.model, config.device, config.dtype, config.compile, config.tokenizer)
    made = [draft for source in sources for draft in _drafts(model, config, source)]
    drafts = [draft for draft in made for _ in range(config.num)]
    model.check(drafts, config.how)
    side = Console(stderr=True, soft_wrap=True)
    done: list[Text] = []
    began = time.perf_counter()
    with contextlib.ExitStack() as held:
        file = held.enter_context(config.out.open("x")) if config.out else None
        if config.watch:
            done += _watched(model, drafts, config, console)
            for text in done:
                _keep(text, sources[text.index // config.num], config, model, file)
        else:
            show = held.enter_context(_progress(side, drafts))
            try:
                for text in model.write(drafts, config.how, config.seed, config.trim, config.batch, show):
                    done.append(text)
                    source = sources[text.index // config.num]
                    _keep(text, source, config, model, file)
                    if not config.json:
                        console.print(Rule(f"{text.index}"))
                        console.print(text.text, markup=False, highlight=False, soft_wrap=True)
            except KeyboardInterrupt:
                where = f" and kept in {config.out}" if config.out else ""
                side.print(f"cdlm: interrupted; {len(done)} of {len(drafts)} texts are written{where}")
                sys.exit(130)
    seconds = time.perf_counter() - began
    (side if config.json else console).print(_summary(model, config, drafts, done, seconds), highlight=False)
    return done


def _sources(config: SampleConfig) -> Iterator[dict[str, str]]:
    """What is to be written: {"prompt": ...}, {"infill": ...} or {"rewrite": ...}."""
    if config.input is None:
        kinds = ("prompt", "infill", "rewrite")
        yield next(
            ({kind: getattr(config, kind)} for kind in kinds if getattr(config, kind) is not None), {"prompt": ""}
        )
        return
    name = "standard input" if config.input == "-" else config.input
    try:
        data = sys.stdin.buffer.read() if config.input == "-" else Path(config.input).read_bytes()
    except FileNotFoundError:
        raise ValueError(f"there is no file {config.input}; --prompt takes a text itself") from None
    found = False
    for number, raw in enumerate(data.splitlines(), 1):
        try:
            line = raw.decode()
        except UnicodeDecodeError:
            raise ValueError(f"line {number} of {name} is not valid UTF-8; save it as UTF-8") from None
        if line.strip():
            found = True
            yield _source(line, f"line {number} of {name}")
    if not found:
        raise ValueError(f"{name} holds no text; give one on each line")


def _source(line: str, where: str) -> dict[str, str]:
    if line.lstrip().startswith("{"):
        try:
            fields = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{where} begins like JSON and is not ({error})") from None
        kinds = [kind for kind in ("prompt", "infill", "rewrite") if isinstance(fields.get(kind), str)]
        if len(kinds) != 1:
            raise ValueError(f"{where} needs one of prompt, infill and rewrite, with a text")
        return {kinds[0]: fields[kinds[0]]}
    return {"infill" if has_blanks(line) else "prompt": line}


def _drafts(model: Model, config: SampleConfig, source: dict[str, str]) -> list[Draft]:
    (kind, text), *_ = source.items()
    if kind == "prompt":
        return model.continuations([text], length=config.length)
    if kind == "infill":
        return model.infillings([text], width=config.width)
    return model.rewritings([text], t=config.noise, clamp=config.clamp)


def _keep(text: Text, source: dict[str, str], config: SampleConfig, model: Model, file: IO[str] | None) -> None:
    """One JSON line to the file, flushed, and to standard output if asked."""
    if file is None and not config.json:
        return
    asked, defaults = vars(config.how), vars(Sampling())
    record: dict[str, Any] = {**dataclasses.asdict(text), **source, "seed": config.seed, "model": model.name}
    record["sampling"] = {name: value for name, value in asked.items() if value != defaults[name]}
    line = json.dumps(record, ensure_ascii=False)
    if file is not None:
        print(line, file=file, flush=True)
    if config.json:
        print(line, flush=True)


@contextlib.contextmanager
def _progress(console: Console, drafts: Sequence[Draft]) -> Iterator[Any]:
    """A bar that moves with the steps of each batch."""
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task: TaskID = progress.add_task("writing", total=len(drafts))
        finished = 0.0

        def show(state: State, size: int) -> None:
            nonlocal finished
            share = state.step / state.steps if state.steps else 0.0
            progress.update(task, completed=finished + size * share)
            if state.steps and state.step == state.steps:
                finished += size

        yield show


def _watched(model: Model, drafts: Sequence[Draft], config: SampleConfig, console: Console) -> list[Text]:
    """Draw every state over the last one; where there is no terminal, below it."""
    before: list[list[int]] | None = None
    frame: Frame | None = None
    with contextlib.ExitStack() as held:
        live = held.enter_context(Live(console=console, auto_refresh=False)) if console.is_terminal else None
        for frame in model.frames(drafts, config.how, config.seed):
            picture = _picture(model, drafts, frame, before)
            if live is None:
                console.print(picture)
            else:
                live.update(picture, refresh=True)
                time.sleep(min(0.15, 3 / (frame.steps or 20)))  # a small model would flash by
            before = frame.tokens
    assert frame is not None
    return [
        Text(k, draft.text(ids, model.tokenizer), ids, frame.evaluations[k])
        for k, (draft, ids) in enumerate(zip(drafts, frame.tokens, strict=True))
    ]


def _picture(model: Model, drafts: Sequence[Draft], frame: Frame, before: list[list[int]] | None) -> Group:
    """The texts of a frame: masks dim, tokens of this step bright."""
    of = f" of {frame.steps}" if frame.steps else ""
    parts: list[Rule | Line] = []
    for k, (draft, ids) in enumerate(zip(drafts, frame.tokens, strict=True)):
        old = before[k] if before is not None else ids
        fresh = [(j < len(old) and old[j] != i) or j >= len(old) for j, i in enumerate(ids)]
        line = Line()
        run: list[int] = []
        for j in range(draft.lead, len(ids)):
            run.append(ids[j])
            masked = ids[j] >= model.denoiser.vocab
            last = j + 1 == len(ids) or fresh[j + 1] != fresh[j] or (ids[j + 1] >= model.denoiser.vocab) != masked
            if last:
                style = "dim" if masked else "bold green" if fresh[j] else ""
                line.append(MASK * len(run) if masked else model.tokenizer.decode(run), style)
                run = []
        parts += [Rule(f"text {k}, step {frame.step}{of}"), line]
    return Group(*parts)


def _summary(model: Model, config: SampleConfig, drafts: Sequence[Draft], done: list[Text], seconds: float) -> str:
    """What it took. Only written tokens count, not those that were given."""
    written = sum(draft.ids.count(HOLE) or len(draft.ids) for draft in drafts)
    evaluations = sum(text.evaluations for text in done) / len(done)
    nats = sum(float(entropy(torch.tensor([text.tokens]))) for text in done if text.tokens) / len(done)
    texts = f"{len(done)} text{'s' * (len(done) > 1)}"
    line = f"{model.name}: {texts}, {evaluations:.4g} evaluations each, entropy {nats:.2f} nats"
    if config.watch:  # drawing takes longer than writing
        return line
    return f"{line}; {written:,} tokens in {seconds:.2f} s, {written / seconds:,.0f} tokens/s"


def _runs() -> str:
    found = sorted(path.parent for path in Path("runs").glob("*/run.json")) if Path("runs").is_dir() else []
    return f", such as {', '.join(map(str, found[:3]))}" if found else " (a folder, a run, or a hub id)"
