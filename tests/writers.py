"""Small models of random weights that write, and tokenizers for them."""

import functools
import json
import tempfile
from pathlib import Path
from typing import Literal

import tokenizers
import torch
from tokenizers import decoders, models

import cdlm
from cdlm.data import END
from cdlm.data.tokenizer import Tokenizer
from cdlm.model.config import NetworkConfig
from cdlm.model.denoiser import Denoiser
from cdlm.model.pretrained import save_denoiser
from cdlm.process import masked, uniform
from cdlm.text.pipeline import Pipeline

Kind = Literal["masked", "uniform", "causal"]
Words = Literal["bytes", "bpe"]

BYTES = Tokenizer.load("bytes")
BPE = Tokenizer.train(["the cat sat on the mat. a dog likes the rain and the old sea."] * 20, 300)
TOKENIZERS = {"bytes": BYTES, "bpe": BPE}


def write_model(
    folder: Path,
    kind: Kind,
    words: Tokenizer = BYTES,
    favour: float = 0.0,
    vocab: int | None = None,
    tied: bool = False,
    own: list[dict[str, object]] | None = None,
    **about: object,
) -> Path:
    """A model folder of random weights. `favour` is added to the logit of the end of text, `own` to its config.json."""
    v = vocab or words.vocab_size
    process = {"masked": masked, "uniform": uniform}[kind](v) if kind != "causal" else None
    torch.manual_seed(1)
    shape = NetworkConfig(
        16, 2, 2, 8, 0.0, time_conditioning=kind == "uniform", causal=process is None, tie_embeddings=tied
    )
    denoiser = Denoiser(shape, process, None if process else v)
    for parameter in denoiser.parameters():
        torch.nn.init.normal_(parameter, 0, 0.3)
    with torch.no_grad():
        denoiser.backbone.output_layer.linear.bias[words.eos] += favour
    save_denoiser(denoiser, folder)
    words.save(folder)
    config = json.loads((folder / "config.json").read_text())
    renamed = {"length": "max_length", "framed": "bos_framed", "padded": "eos_padded"}
    text = {renamed.get(name, name): value for name, value in about.items()}
    config |= ({"text": text} if text else {}) | ({"sampling": own} if own else {})
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@functools.cache
def small(
    kind: Kind = "masked", words: Words = "bytes", favour: float = 0.0, length: int = 32, **about: bool
) -> Pipeline:
    """The same in double precision, where a text does not depend on its batch."""
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder) / "small", kind, TOKENIZERS[words], favour, length=length, **about)
        return cdlm.load(Path(folder) / "small", "cpu", "float64")


def spelled(vocab: str) -> Tokenizer:
    """A tokenizer of single characters that drops whatever it does not know."""
    model = tokenizers.Tokenizer(models.BPE({c: i for i, c in enumerate(vocab)}, []))
    model.decoder = decoders.BPEDecoder()
    model.add_special_tokens([END])
    with tempfile.TemporaryDirectory() as folder:
        model.save(f"{folder}/tokenizer.json")
        return Tokenizer.load(folder)
