"""`cdlm convert`: turn a checkpoint of Lightning into a model directory."""

import dataclasses
from pathlib import Path
from typing import Literal

import tyro

from cdlm.cli.common import parse


@dataclasses.dataclass(frozen=True)
class ConvertConfig:
    """Turn a .ckpt file of MDLM, UDLM, DUO or SDTT into a model directory.

    Only tensors are read: nothing that the file contains is imported or called. The EMA weights are taken where it has
    them. SDTT's network is MDLM's: --model-type mdlm.
    """

    checkpoint: tyro.conf.Positional[Path]
    """A .ckpt file that Lightning wrote."""
    out: Path
    """The model directory to write; it must not exist yet."""
    model_type: Literal["mdlm", "udlm", "duo"]
    """Whose training code wrote it: mdlm has a mask, udlm and duo noise with uniform tokens."""
    max_length: int
    """Tokens in a sequence that it was trained on: 1024 on OpenWebText, 128 on LM1B."""
    tokenizer: Path | None = None
    """A tokenizer.json or a directory of GPT-2's files, to be stored beside the weights."""
    use_ema: bool = True
    """Take the EMA weights, as the papers' evaluations do; --no-use-ema takes the raw ones."""
    bos_framed: bool | None = None
    """Whether it was trained on BOS-framed blocks (wrapped data). [yes for mdlm and duo, no for udlm]"""
    time_conditioning: bool | None = None
    """Whether the network is time-conditioned. [no for mdlm, yes for udlm and duo]"""
    num_heads: int | None = None
    """Attention heads. [from the rotary frequencies in the file]"""

    def __post_init__(self) -> None:
        for name in ("max_length", "num_heads"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"--{name.replace('_', '-')} must be at least 1 (got {value}).")


def main(arguments: list[str]) -> None:
    config = parse(ConvertConfig, "convert", arguments)
    from cdlm.interop.lightning import convert

    done = convert(
        config.checkpoint,
        config.out,
        config.model_type,
        config.max_length,
        use_ema=config.use_ema,
        bos_framed=config.bos_framed,
        time_conditioning=config.time_conditioning,
        num_heads=config.num_heads,
        tokenizer=config.tokenizer,
    )
    which = "the EMA weights" if done.weights == "ema" else "the raw weights (no EMA)"
    tokenizer = "" if config.tokenizer else " --tokenizer TOKENIZER"
    print(f"wrote {done.directory}: {which}, {done.num_parameters:,} parameters")
    print(f"try: cdlm sample {done.directory}{tokenizer}")
