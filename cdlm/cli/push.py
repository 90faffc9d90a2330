"""`cdlm push`: upload a model to the hub."""

import dataclasses
import tempfile
from pathlib import Path

import tyro

from cdlm.cli.common import parse
from cdlm.devices import Dtype
from cdlm.hub import check_id, push, write_card


@dataclasses.dataclass(frozen=True)
class PushConfig:
    """Upload a model to the hub: with its tokenizer, a card, and code for transformers."""

    model: tyro.conf.Positional[str]
    """A model directory or a run."""
    to: tyro.conf.Positional[str]
    """The repository: owner/name."""
    private: bool = False
    """For your eyes only."""
    dtype: Dtype = "float32"
    """Precision of the uploaded weights; bfloat16 halves them."""
    results: tuple[Path, ...] = ()
    """What `cdlm eval` found, for the card."""
    tokenizer: Path | None = None
    """A tokenizer.json or a directory of GPT-2's files, for a model directory that has none."""

    def __post_init__(self) -> None:
        check_id(self.to)


def main(arguments: list[str]) -> None:
    print(upload(parse(PushConfig, "push", arguments)))


def upload(config: PushConfig) -> str:
    """Write a directory for others, with a card that shows the results, and push it."""
    from cdlm.eval.results import read_rows
    from cdlm.text.pipeline import load

    rows = [row for folder in config.results for row in read_rows(folder)]
    model = load(config.model, "cpu", "float32", tokenizer=config.tokenizer)
    with tempfile.TemporaryDirectory() as scratch:
        folder = model.save_pretrained(Path(scratch) / "model", config.dtype)
        write_card(folder, config.to, model.denoiser.count(), rows)
        return push(folder, config.to, config.private)
