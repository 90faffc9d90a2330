"""Models on their way out and in: folders that stand alone, with a card and code for `transformers`; push and pull.

cdlm.load("runs/small-mcdlm").save_pretrained("my-model", dtype="bfloat16")
cdlm push my-model owner/name
cdlm pull owner/name my-copy
"""

import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from cdlm import __version__
from cdlm.devices import Dtype
from cdlm.eval.results import Row
from cdlm.fetch import NEEDED, reason
from cdlm.files import read_object
from cdlm.methods import METHODS
from cdlm.model import pretrained
from cdlm.model.denoiser import Denoiser

CODE = "modeling_cdlm.py"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}
PATTERNS = [*NEEDED, "README.md", CODE]
_HEAD = ["---", "library_name: cdlm", "pipeline_tag: text-generation", "tags:", "- discrete-diffusion", "---", ""]
"""How a card begins; by this it is known again."""


@dataclasses.dataclass(frozen=True)
class PushConfig:
    """Upload a model to the hub: with its tokenizer, a card, and code for transformers."""

    model: str
    """A model folder or a run."""
    to: str
    """The repository: owner/name."""
    private: bool = False
    """For your eyes only."""
    dtype: Dtype = "float32"
    """Precision of the uploaded weights; bfloat16 halves them."""
    results: tuple[Path, ...] = ()
    """What `cdlm eval` found, for the card."""
    tokenizer: Path | None = None
    """A tokenizer.json or a folder of GPT-2's files, for a model folder that has none."""

    def __post_init__(self) -> None:
        _check_id(self.to)


@dataclasses.dataclass(frozen=True)
class PullConfig:
    """Download a model from the hub into a folder."""

    source: str
    """The repository: owner/name."""
    out: Path
    """A folder that does not exist yet."""
    revision: str | None = None
    """A branch, tag or commit."""

    def __post_init__(self) -> None:
        _check_id(self.source)
        if self.out.exists():
            raise ValueError(f"{self.out} exists; name another folder, or remove it first")


def write_folder(
    denoiser: Denoiser,
    tokenizer_folder: Path,
    about: dict[str, Any],
    out: Path,
    dtype: Dtype = "float32",
    rows: Sequence[Row] = (),
    part: int | None = None,
) -> Path:
    """A model folder for others: weights, tokenizer, how to sample it, a card, and code that transformers runs.

    A README.md that is there already and not a card of ours stays as it is.
    """
    if (out / "config.json").exists():
        raise ValueError(f"{out} holds a model already; name another folder, or remove it first")
    pretrained.save(denoiser, out, DTYPES[dtype], part)
    config = read_object(out / "config.json") | about
    if denoiser.process is not None:
        name = Path(CODE).stem
        config |= {"model_type": "cdlm", "architectures": ["CDLMForMaskedLM"]}
        config["auto_map"] = {"AutoConfig": f"{name}.CDLMConfig", "AutoModelForMaskedLM": f"{name}.CDLMForMaskedLM"}
        config["process"]["states"] = denoiser.process.states
        (out / CODE).write_text(_CODE)
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    for file in ("tokenizer.json", "vocab.json", "merges.txt"):
        if (tokenizer_folder / file).is_file():
            (out / file).write_bytes((tokenizer_folder / file).read_bytes())
    write_card(out, out.name, denoiser.count(), rows)
    return out


def write_card(folder: Path, name: str, parameters: int, rows: Sequence[Row] = ()) -> None:
    """The card of a model folder, under the name that one loads it by; the README.md of another hand is not touched."""
    path = folder / "README.md"
    if not path.exists() or path.read_text(encoding="utf-8", errors="replace").startswith("\n".join(_HEAD)):
        path.write_text(card(name, read_object(folder / "config.json"), parameters, rows), encoding="utf-8")


def push(config: PushConfig) -> str:
    """Upload; returns the address."""
    import tempfile

    from cdlm.eval.results import read_rows
    from cdlm.text import load

    api = _hub().HfApi()
    rows = [row for folder in config.results for row in read_rows(folder)]
    model = load(config.model, "cpu", "float32", tokenizer=config.tokenizer)
    with tempfile.TemporaryDirectory() as scratch:
        folder = model.save_pretrained(Path(scratch) / "model", config.dtype)
        write_card(folder, config.to, model.denoiser.count(), rows)
        try:
            api.create_repo(config.to, private=config.private, exist_ok=True)
            api.upload_folder(repo_id=config.to, folder_path=str(folder), commit_message=f"cdlm {__version__}")
        except Exception as error:  # as in `pull`
            raise ValueError(
                f"the model hub did not take {config.to}: {reason(error)}; check the connection and the login of its "
                "client (hf auth login) and run it again"
            ) from None
    return f"{config.to}: cdlm sample {config.to}"


def pull(config: PullConfig) -> Path:
    """Download; the folder is there whole, or not at all. What an interrupted download left goes on if it is of the
    same commit, and nothing else is ever mixed in. Where the client is offline, what it keeps is copied."""
    hub = _hub()
    kept: Path | None = None
    try:
        try:
            commit = hub.HfApi().model_info(config.source, revision=config.revision).sha
        except ConnectionError:  # HF_HUB_OFFLINE is set
            asked = {"revision": config.revision, "allow_patterns": NEEDED}
            kept = Path(hub.snapshot_download(config.source, local_files_only=True, **asked))
            commit = kept.name
        aside = config.out.with_name(f"{config.out.name}.{commit}.partial")
        if kept is None:
            hub.snapshot_download(config.source, revision=commit, local_dir=str(aside), allow_patterns=PATTERNS)
    except Exception as error:  # of whatever the client's network is built on, which changes with its version
        raise ValueError(
            f"the model hub did not give {config.source}: {reason(error)}; check the name and the connection and run "
            "it again, or copy the model's folder from a machine that has it"
        ) from None
    pretrained.load(kept or aside)  # what cannot be opened is not handed over
    if kept is not None:
        aside.mkdir(parents=True, exist_ok=True)
        for path in {path for pattern in PATTERNS for path in kept.glob(pattern)}:
            (aside / path.name).write_bytes(path.read_bytes())
    aside.rename(config.out)
    return config.out


def card(name: str, config: dict[str, Any], parameters: int, rows: Sequence[Row] = ()) -> str:
    """The README.md of a model: what it is, how it was made, how to use it, and what was measured."""
    trained, text = config.get("trained") or {}, config.get("text") or {}
    method = str(trained.get("method", "")).partition(":")[0]
    process = config.get("process")
    kind = "autoregressive" if process is None else f"{process['name']} diffusion"
    lines = [*_HEAD, f"# {name}", ""]
    lines += [f"A {kind} language model with {parameters / 1e6:,.1f}M parameters, written by cdlm {__version__}.", ""]
    if trained:
        how = METHODS[method].name if method in METHODS else method
        tokens = trained["steps"] * trained.get("batch", 0) * trained.get("length", 0)
        line = f"Trained by {how} (`{trained['method']}`): {trained['steps']:,} steps"
        lines += [line + (f", {tokens / 1e6:,.0f}M tokens." if tokens else "."), ""]
        if trained.get("from"):
            base = trained["from"]
            lines += [f"It started from a model trained by `{base['method']}` for {base['steps']:,} steps.", ""]
    if text.get("length"):
        lines += [f"Texts have up to {text['length']:,} tokens.", ""]
    lines += [
        "## Use",
        "",
        "```python",
        "import cdlm",
        "",
        f'model = cdlm.load("{name}")',
        "print(model.sample(steps=16)[0])",
    ]
    lines += ["```", ""]
    if process is not None:
        lines += ["With transformers, where cdlm is installed:", "", "```python"]
        lines += ["import torch", "from transformers import AutoModelForMaskedLM", ""]
        lines += [
            f'model = AutoModelForMaskedLM.from_pretrained("{name}", trust_remote_code=True, dtype=torch.float32)'
        ]
        lines += ["logits = model(input_ids, timesteps=0.5).logits", "```", ""]
    judged = [row for row in rows if "ppl" in row and row["task"] == "unconditional"]
    if judged:
        lines += [
            "## Measured",
            "",
            "| texts | steps | judge | perplexity | entropy |",
            "| --- | --- | --- | --- | --- |",
        ]
        for row in judged:
            steps = row["sampling"]["steps"] or ""
            lines.append(f"| {row['num']} | {steps} | {row['judge']} | {row['ppl']:.1f} | {row['entropy']:.2f} |")
        lines.append("")
    bounds = [row for row in rows if "nelbo" in row]
    lines += [
        f"NELBO on {row['set']}: {row['nelbo']:.3f} nats per token ({math.exp(row['nelbo']):.1f})." for row in bounds
    ]
    lines += [""] * bool(bounds)
    lines += ["## Limits", ""]
    lines += ["It repeats what its data says, true or not, and was not taught to be helpful or harmless.", ""]
    return "\n".join(lines)


def _hub() -> Any:
    try:
        import huggingface_hub
    except ImportError:
        raise ValueError("the model hub needs its client: pip install huggingface-hub") from None
    return huggingface_hub


def _check_id(name: str) -> None:
    owner, slash, rest = name.partition("/")
    if not (owner and slash and rest) or "/" in rest:
        raise ValueError(f"a repository of the model hub is owner/name; got {name!r}")


_CODE = '''"""Lets transformers open this folder; the model itself is in the package cdlm (install its checkout)."""

from cdlm.model.hf import CDLMConfig, CDLMForMaskedLM

__all__ = ["CDLMConfig", "CDLMForMaskedLM"]
'''
