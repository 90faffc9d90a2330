"""`cdlm zoo`: the models that come with the package."""

import dataclasses

from rich.console import Console
from rich.table import Table

from cdlm import zoo
from cdlm.cli.common import console, parse
from cdlm.sample.settings import explicit, flags, resolve


@dataclasses.dataclass(frozen=True)
class ZooConfig:
    """List the models that come with cdlm, what each is and how it writes best."""


def main(arguments: list[str]) -> None:
    parse(ZooConfig, "zoo", arguments)
    show_zoo(console())


def show_zoo(console: Console) -> None:
    """The models that come with the package: what they are, how they write best, and where they lie."""
    from cdlm.methods.spec import method_name
    from cdlm.model import pretrained
    from cdlm.sample.generation_config import read_generation_config

    table = Table(title="Models that come with cdlm", show_lines=True)
    for heading in ("model", "trained by", "parameters", "on disk", "tokens seen"):
        table.add_column(heading, justify="right" if heading in ("parameters", "on disk", "tokens seen") else "left")
    best: list[str] = []
    for name in (*zoo.names(), *zoo.sudoku_names().values()):
        folder = zoo.HERE / name
        config = pretrained.read_model_config(folder)
        size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
        numbers = pretrained.count(folder)
        training = config["training"]
        chain: dict[str, None] = {}
        tokens_seen = 0
        while training:
            chain[method_name(training["method"])] = None
            tokens_seen += training["steps"] * training["batch_size"] * training["seq_length"]
            training = training["from"]
        table.add_row(
            name, ", after ".join(chain), f"{numbers / 1e6:.1f}M", f"{size / 1e6:.2g} MB", f"{tokens_seen / 1e9:.2f}B"
        )
        usual = read_generation_config(folder, config)
        presets = usual.get("step_presets", [usual])
        best += [f"generation config of {name}", *(f"  {flags(explicit(resolve(preset)))}" for preset in presets)]
    console.print(table)
    missing = [name for name in zoo.SUDOKU.values() if name not in zoo.sudoku_names().values()]
    if missing:
        console.print(
            f"{' and '.join(missing)}: not included in this version; cdlm sudoku uses the exact denoiser instead",
            highlight=False,
            soft_wrap=True,
        )
    for line in best:
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    console.print(f"{zoo.HERE} has them, each with a card. Use them by name:", highlight=False, soft_wrap=True)
    for command, about in (
        ("cdlm sample", "the first of them writes four texts"),
        ('cdlm sample mdlm --prompt "The sea was"', "the other one continues a text"),
        ("cdlm sample --steps 32 --watch --num-samples 1", "a text resolves; settings follow the number of steps"),
        ("cdlm studio", "both side by side, in a browser"),
        ("cdlm sudoku", "Sudoku grids fill in, step by step"),
    ):
        console.print(f"  {command:<40} {about}", highlight=False, markup=False)
