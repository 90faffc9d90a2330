"""Where models come from and go to: directories, models that come with the package, and the model hub.

cdlm.load("runs/small-mcdlm").save_pretrained("my-model", dtype="bfloat16")
cdlm push my-model owner/name
cdlm pull owner/name my-copy

`model_directory` finds a model by any of its names. `write_model_directory` writes a self-contained one, with a model
card and code for `transformers`; `push` and `pull` exchange it with the model hub. torch is imported by what opens or
writes a model.
"""

import difflib
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cdlm import zoo
from cdlm.devices import Dtype
from cdlm.files import VERSION

if TYPE_CHECKING:
    from cdlm.model.denoiser import Denoiser

WAIT = 5.0
"""Seconds for the hub to answer at all."""
NEEDED = ["*.json", "*.safetensors", "merges.txt"]
"""All that `cdlm.load` fetches."""


CODE = "modeling_cdlm.py"
PATTERNS = [*NEEDED, "README.md", CODE]
_HEAD = ["---", "library_name: cdlm", "pipeline_tag: text-generation", "tags:", "- discrete-diffusion", "---", ""]
"""How a card begins; by this it is known again."""


class ModelNotFoundError(ValueError):
    """There is no model of that name."""

    def __init__(self, source: str | Path, advice: str) -> None:
        super().__init__(f"{source} does not exist; {advice}")
        self.source = Path(source)


def model_directory(source: str | Path, code: bool = False) -> Path:
    """The directory of a model: a local one, a bundled model, or a download of a repository of the model hub.

    The hub is not asked for what is meant as a path. Python files are downloaded if the `code` is trusted.
    """
    path = zoo.locate(Path(source).expanduser())
    if path.exists():
        return path
    if path.parent.is_dir() or path.parts[:1] == ("runs",) or not re.fullmatch(r"[\w.-]+/[\w.-]+", str(source)):
        raise ModelNotFoundError(source, _instead(path))
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError
    except ImportError:
        raise ValueError(
            f"there is no directory {source}; to fetch it from the model hub: pip install huggingface-hub"
        ) from None
    try:
        return Path(snapshot_download(str(source), allow_patterns=[*NEEDED, "*.py"] if code else NEEDED))
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        raise ValueError(
            f"there is no directory {source}, and the model hub did not give it either: {reason(error)}"
        ) from None


def hub_connection_error() -> str | None:
    """Why the model hub cannot be reached, in a few words; None if it can.

    This is a single request, where the hub's client would retry. Cached files are available without a connection.
    """
    from huggingface_hub import constants, get_session

    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    try:
        get_session().head(constants.ENDPOINT, timeout=WAIT)
    except Exception as error:  # of whatever its network is built on, which changes with its version
        return reason(error)
    return None


def reason(error: Exception) -> str:
    """An error in one line."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def parse_models(models: Iterable[str]) -> list[tuple[str, str]]:
    """Labels and models of a command: LABEL=MODEL, or a model that is labelled with the name of its directory."""
    words = (word.partition("=") for word in models)
    found = [(first, source) if equals else (Path(first).name, first) for first, equals, source in words]
    labels = [label for label, _ in found]
    twice = next((label for label in labels if labels.count(label) > 1), None)
    if twice:
        raise ValueError(f"two models are called {twice}; give each a name: NAME=MODEL")
    return found


def write_model_directory(
    denoiser: "Denoiser",
    tokenizer_folder: Path,
    about: dict[str, Any],
    out: Path,
    dtype: Dtype = "float32",
    rows: Sequence[Mapping[str, Any]] = (),
    part: int | None = None,
) -> Path:
    """Write a self-contained model directory: weights, tokenizer, generation config, card, and code for transformers.

    A README.md that is there already and not a card of ours stays as it is.
    """
    import torch

    from cdlm.model import pretrained

    if denoiser.custom_network:
        raise ValueError(
            f"only a network of cdlm can be exported (got {denoiser.custom_network}); share its checkpoint instead, "
            "which cdlm.load opens with the same network"
        )
    check_free(out)
    pretrained.save_denoiser(denoiser, out, getattr(torch, dtype), part)
    config = pretrained.read_model_config(out) | about
    kind = "CausalLM" if denoiser.process is None else "MaskedLM"
    name, model = Path(CODE).stem, f"CDLMFor{kind}"
    config |= {"model_type": "cdlm", "architectures": [model]}
    config["auto_map"] = {"AutoConfig": f"{name}.CDLMConfig", f"AutoModelFor{kind}": f"{name}.{model}"}
    if denoiser.process is not None:
        config["process"]["num_states"] = denoiser.process.states
    (out / CODE).write_bytes((Path(__file__).parent / "interop" / CODE).read_bytes())
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    for file in ("tokenizer.json", "vocab.json", "merges.txt"):
        if (tokenizer_folder / file).is_file():
            (out / file).write_bytes((tokenizer_folder / file).read_bytes())
    write_card(out, out.name, denoiser.count(), rows)
    return out


def check_free(out: Path) -> None:
    """Refuse to write over a model."""
    if (out / "config.json").exists():
        raise ValueError(f"{out} holds a model already; name another directory, or remove it first")


def write_card(folder: Path, name: str, parameters: int, rows: Sequence[Mapping[str, Any]] = ()) -> None:
    """Write the card of a model directory, with the name to load it by; a README.md of the user's is not touched."""
    from cdlm.model import pretrained

    path = folder / "README.md"
    if not path.exists() or path.read_text(encoding="utf-8", errors="replace").startswith("\n".join(_HEAD)):
        path.write_text(card(name, pretrained.read_model_config(folder), parameters, rows), encoding="utf-8")


def push(folder: Path, to: str, private: bool = False) -> str:
    """Upload a directory that `write_model_directory` has written; returns what to type next."""
    check_id(to)
    api = _hub().HfApi()
    try:
        api.create_repo(to, private=private, exist_ok=True)
        api.upload_folder(repo_id=to, folder_path=str(folder), commit_message=f"cdlm {VERSION}")
    except Exception as error:  # as in `pull`
        raise ValueError(
            f"the model hub did not take {to}: {reason(error)}; check the connection and the login of its "
            "client (hf auth login) and run it again"
        ) from None
    return f"{to}: cdlm sample {to}"


def pull(source: str, out: Path, revision: str | None = None) -> Path:
    """Download; the directory is there whole, or not at all. What an interrupted download left goes on if it is of the
    same commit, and nothing else is ever mixed in. Where the client is offline, what it keeps is copied."""
    from cdlm.model import pretrained

    check_id(source)
    if out.exists():
        raise ValueError(f"{out} exists; name another directory, or remove it first")
    hub = _hub()
    kept: Path | None = None
    try:
        try:
            commit = hub.HfApi().model_info(source, revision=revision).sha
        except ConnectionError:  # HF_HUB_OFFLINE is set
            kept = Path(hub.snapshot_download(source, local_files_only=True, revision=revision, allow_patterns=NEEDED))
            commit = kept.name
        aside = out.with_name(f"{out.name}.{commit}.partial")
        if kept is None:
            hub.snapshot_download(source, revision=commit, local_dir=str(aside), allow_patterns=PATTERNS)
    except Exception as error:  # of whatever the client's network is built on, which changes with its version
        raise ValueError(
            f"the model hub did not give {source}: {reason(error)}; check the name and the connection and run "
            "it again, or copy the model's directory from a machine that has it"
        ) from None
    pretrained.load_denoiser(kept or aside)  # what cannot be opened is not handed over
    if kept is not None:
        aside.mkdir(parents=True, exist_ok=True)
        for path in {path for pattern in PATTERNS for path in kept.glob(pattern)}:
            (aside / path.name).write_bytes(path.read_bytes())
    aside.rename(out)
    return out


def card(name: str, config: dict[str, Any], parameters: int, rows: Sequence[Mapping[str, Any]] = ()) -> str:
    """The README.md of a model: what it is, how it was made, how to use it, and what was measured."""
    from cdlm.methods.spec import method_name
    from cdlm.model.pretrained import custom_network

    training = config.get("training") or {}
    max_length = (config.get("text") or {}).get("max_length")
    process = config.get("process")
    kind = "autoregressive" if process is None else f"{process['name']} diffusion"
    lines = [*_HEAD, f"# {name}", ""]
    lines += [f"A {kind} language model with {parameters / 1e6:,.1f}M parameters, written by cdlm {VERSION}.", ""]
    if training:
        method = method_name(training["method"])
        tokens = training["steps"] * training.get("batch_size", 0) * training.get("seq_length", 0)
        line = f"Trained by {method} (`{training['method']}`): {training['steps']:,} steps"
        lines += [line + (f", {tokens / 1e6:,.0f}M tokens." if tokens else "."), ""]
        if training.get("from"):
            base = training["from"]
            lines += [f"It started from a model trained by `{base['method']}` for {base['steps']:,} steps.", ""]
    if max_length:
        lines += [f"Texts have up to {max_length:,} tokens.", ""]
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
    if not custom_network(config):
        kind = "AutoModelForCausalLM" if process is None else "AutoModelForMaskedLM"
        lines += ["With transformers alone:", "", "```python", f"from transformers import {kind}, AutoTokenizer", ""]
        lines += [f'model = {kind}.from_pretrained("{name}", trust_remote_code=True, dtype="float32")']
        lines += [f'tokenizer = AutoTokenizer.from_pretrained("{name}", trust_remote_code=True)']
        lines += ['prompt = tokenizer("Once", return_tensors="pt")']
        if process is None:
            lines += ["sequences = model.generate(**prompt, max_new_tokens=32, do_sample=True)"]
        else:
            lines += ["sequences = model.generate(**prompt, max_denoising_steps=16).sequences"]
        lines += ["print(tokenizer.decode(sequences[0], skip_special_tokens=True))", "```", ""]
    judged = [row for row in rows if "ppl" in row and row["task"] == "unconditional"]
    if judged:
        lines += [
            "## Measured",
            "",
            "| samples | steps | judge | perplexity | entropy |",
            "| --- | --- | --- | --- | --- |",
        ]
        for row in judged:
            steps = row["sampling"]["steps"] or ""
            lines.append(
                f"| {row['num_samples']} | {steps} | {row['judge']} | {row['ppl']:.1f} | {row['entropy']:.2f} |"
            )
        lines.append("")
    bounds = [row for row in rows if "nelbo" in row]
    lines += [
        f"NELBO on {row['dataset']}: {row['nelbo']:.3f} nats per token ({math.exp(row['nelbo']):.1f})."
        for row in bounds
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


def check_id(name: str) -> None:
    owner, slash, rest = name.partition("/")
    if not (owner and slash and rest) or "/" in rest:
        raise ValueError(f"a repository of the model hub is owner/name; got {name!r}")


def _instead(missing: Path) -> str:
    """What may have been meant by a directory that is not there: one of a similar name."""
    folders = [folder for place in {missing.parent, Path("runs")} for folder in sorted(place.glob("*/"))]
    known = {
        str(one): one.name for one in folders if any((one / file).is_file() for file in ("run.json", "config.json"))
    }
    bundled = [*zoo.names(), *zoo.sudoku_names().values()]
    there = known | {name: name for name in bundled if missing.parent == Path()}
    near = [missing.name] if missing.name in there.values() else []
    near = near or [name for name in there.values() if name.startswith(missing.name.lower())]
    near = near or difflib.get_close_matches(missing.name.lower(), there.values(), n=3)
    meant = ", ".join(sorted(path for path, name in there.items() if name in near))
    if meant:
        return f"did you mean {meant}?"
    runs = f" (there are: {', '.join(sorted(known))})" if 0 < len(known) <= 10 else ""
    models = f"a model of cdlm zoo ({', '.join(bundled)})"
    return f"give a directory with config.json and model.safetensors, a run{runs}, {models}, or a hub id, owner/name"
