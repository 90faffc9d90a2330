"""The command line. Every command is a typed configuration; its attribute docstrings are its help."""

import dataclasses
import difflib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, TypeVar

import tyro
from rich.console import Console

from cdlm import __version__
from cdlm.config import RunConfig, read_config

Config = TypeVar("Config")


def methods(arguments: list[str]) -> None:
    """Print the table of methods; with --run, train each for one step."""
    from cdlm.show import MethodsConfig, show_methods

    show_methods(_parse(MethodsConfig, "methods", arguments), _console())


def moons(arguments: list[str]) -> None:
    """Train methods on two moons, sample with few steps, draw the figure."""
    from cdlm.moons import MoonsConfig, run_moons

    run_moons(_parse(MoonsConfig, "moons", arguments), _console())


def demo(arguments: list[str]) -> None:
    """Show what few steps buy: two models side by side, two moons, one page."""
    from cdlm.demo import DemoConfig, run_demo

    run_demo(_parse(DemoConfig, "demo", arguments), _console())


def zoo(arguments: list[str]) -> None:
    """List the models that come with cdlm, and how each writes best."""
    from cdlm.show import show_zoo

    _parse(Zoo, "zoo", arguments)
    show_zoo(_console())


def prepare(arguments: list[str]) -> None:
    """Turn text into tokens: .txt, .jsonl, .parquet or a dataset."""
    from cdlm.data.prepare import PrepareConfig
    from cdlm.data.prepare import prepare as run

    if not arguments:
        _fail("prepare takes a text and a folder to write: cdlm prepare FILE... --out DIR")
    run(_parse(PrepareConfig, "prepare", arguments, positional="files"), _console())


def recipes(arguments: list[str]) -> None:
    """List the named runs, what each reproduces and what it costs."""
    from cdlm.show import show_recipes

    _parse(Recipes, "recipes", arguments)
    show_recipes(_console())


def train(arguments: list[str]) -> None:
    """Train a recipe, or the run.json of an earlier run: cdlm train RECIPE --data DIR."""
    from cdlm.train.loop import Resume, Stopped
    from cdlm.train.loop import train as run

    if arguments[:1] in (["-h"], ["--help"]):
        print("usage: cdlm train RECIPE --data DIR [--resume auto] [any setting below]\n")
        print("Recipes begin with tiny- (a laptop, a minute), small- (one GPU), zoo-, or are the paper's: cdlm recipes")
        print("Each has the same settings with defaults of its own; these are those of tiny-mcdlm:\n")
        arguments = ["tiny-mcdlm", "--help"]
    if not arguments or arguments[0].startswith("-"):
        _fail("train takes a recipe or a run.json first, such as: cdlm train tiny-mcdlm --data DIR; see cdlm recipes")
    default = _recipe(arguments[0])

    @dataclasses.dataclass(frozen=True)
    class Train:
        """Train a model; nothing is lost if the machine dies: go on with --resume auto."""

        config: Annotated[RunConfig, tyro.conf.arg(name="")] = default
        resume: Resume = "no"
        """auto continues the run in --out if there is one; force does so although its settings differ."""

    chosen = _parse(Train, f"train {arguments[0]}", arguments[1:])
    try:
        run(chosen.config, chosen.resume)
    except Stopped as end:  # not a success: what follows in a script must not take the run for finished
        print(f"cdlm: {end}", file=sys.stderr)
        sys.exit(143)


def plot(arguments: list[str]) -> None:
    """Draw the curves of a run, or the schedules of a recipe."""
    from cdlm.plot import plot_run, plot_schedules

    chosen = _parse(Plot, "plot", arguments, positional="what")
    run = Path(chosen.what)
    if (run / "metrics.jsonl").is_file():
        print(f"wrote {plot_run(run, chosen.out or run / 'curves.png')}")
    elif run.is_dir():
        known = (run / "run.json").is_file()
        why = "has no metrics yet: wait for its first --log-every steps" if known else "is not the folder of a run"
        _fail(f"{run} {why}; or give the name of a recipe")
    else:
        name = chosen.what.replace("/", "-")
        out = chosen.out or Path(f"runs/schedules-{name}.png")
        print(f"wrote {plot_schedules(_recipe(chosen.what), name, out)}")


def sample(arguments: list[str]) -> None:
    """Write text with a model that comes with cdlm, another one, or a run."""
    from cdlm.sample import Sampling
    from cdlm.write import SampleConfig, write_texts

    words = {word.partition("=")[0].removeprefix("--").replace("-", "_") for word in arguments if word[:2] == "--"}
    given = [field.name for field in dataclasses.fields(Sampling) if field.name in words]
    write_texts(_parse(SampleConfig, "sample", arguments, positional="model"), _console(), given)


def evaluate(arguments: list[str]) -> None:
    """Measure models: perplexity under a judge, entropy, BLEU, MAUVE, NELBO, consistency."""
    from cdlm.eval.grid import EvalConfig
    from cdlm.eval.suite import evaluate as run

    run(_parse(EvalConfig, "eval", arguments, positional="models"), _console())


def report(arguments: list[str]) -> None:
    """Turn results into the paper's tables and figures, and frontiers at matched entropy."""
    from cdlm.report.write import ReportConfig, write_report

    write_report(_parse(ReportConfig, "report", arguments, positional="results"), _console())


def push(arguments: list[str]) -> None:
    """Upload a model to the hub, with a card: cdlm push MODEL owner/name."""
    from cdlm.hub import PushConfig
    from cdlm.hub import push as run

    print(run(_parse(PushConfig, "push", arguments, positional="model to")))


def pull(arguments: list[str]) -> None:
    """Download a model from the hub: cdlm pull owner/name FOLDER."""
    from cdlm.hub import PullConfig
    from cdlm.hub import pull as run

    print(f"wrote {run(_parse(PullConfig, 'pull', arguments, positional='source out'))}")


def studio(arguments: list[str]) -> None:
    """Watch models write in a browser, and use them over HTTP."""
    from cdlm.studio.serve import StudioConfig, serve

    serve(_parse(StudioConfig, "studio", arguments, positional="models"), _console())


def cost(arguments: list[str]) -> None:
    """Estimate FLOPs, memory, step time and days of a recipe: cdlm cost RECIPE --gpus 64 --gpu h100."""
    from cdlm.cost import CostConfig, show_cost

    chosen = _parse(CostConfig, "cost", arguments, positional="recipe")
    show_cost(chosen, _recipe(chosen.recipe), _console())


@dataclasses.dataclass(frozen=True)
class Recipes:
    """List the named runs, what each reproduces and what it costs."""


@dataclasses.dataclass(frozen=True)
class Zoo:
    """List the models that come with cdlm, what each is and how it writes best."""


@dataclasses.dataclass(frozen=True)
class Plot:
    """Draw the curves of a run (loss, NELBO, entropy), or the schedules of a recipe (kappa, delta, lambda)."""

    what: str
    """The folder of a run, or the name of a recipe."""
    out: Path | None = None
    """The picture; RUN/curves.png or runs/schedules-RECIPE.png unless told otherwise."""


COMMANDS: dict[str, Callable[[list[str]], None]] = {
    "demo": demo,
    "zoo": zoo,
    "methods": methods,
    "moons": moons,
    "recipes": recipes,
    "cost": cost,
    "prepare": prepare,
    "train": train,
    "plot": plot,
    "sample": sample,
    "eval": evaluate,
    "report": report,
    "studio": studio,
    "push": push,
    "pull": pull,
}


def cli(arguments: list[str] | None = None) -> None:
    """Run `cdlm COMMAND ...`."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if not arguments or arguments[0] in ("-h", "--help"):
        stream = sys.stdout if arguments else sys.stderr
        print("usage: cdlm COMMAND [--help] ...\n", file=stream)
        print("Consistent Diffusion Language Models: text in few denoising steps.\n", file=stream)
        for name, command in COMMANDS.items():
            print(f"  {name:<9} {(command.__doc__ or '').strip()}", file=stream)
        sys.exit(0 if arguments else 2)
    if arguments[0] == "--version":
        print(__version__)
        return
    if arguments[0] not in COMMANDS:
        near = difflib.get_close_matches(arguments[0], COMMANDS, n=1)
        hint = f"did you mean {near[0]}?" if near else f"there are: {', '.join(COMMANDS)}"
        _fail(f"there is no command {arguments[0]!r}; {hint}")
    COMMANDS[arguments[0]](arguments[1:])


def _parse(kind: type[Config], name: str, arguments: list[str], positional: str | None = None) -> Config:
    """The configuration that the arguments describe; some fields may be given without their flags."""
    for field in (positional or "").split():
        kind = _with_positional(kind, field)
    kind = _subclass(kind, f"cdlm {name}")  # errors begin with this name
    return tyro.cli(kind, prog=f"cdlm {name}", args=arguments, registry=_REGISTRY)


def _with_positional(kind: type[Config], name: str) -> type[Config]:
    """The same configuration with one field that needs no flag; the core itself does not import the parser."""
    fields = dataclasses.fields(kind)  # type: ignore[arg-type]
    hint = next(field.type for field in fields if field.name == name)
    return _subclass(kind, kind.__name__, {name: tyro.conf.Positional[hint]})


def _subclass(kind: type[Config], name: str, hints: dict[str, Any] | None = None) -> type[Config]:
    extra = {"__annotations__": hints or {}, "__doc__": kind.__doc__}
    return dataclasses.dataclass(frozen=True)(type(name, (kind,), extra))


_REGISTRY = tyro.constructors.ConstructorRegistry()


@_REGISTRY.primitive_rule
def _whole_number(info: tyro.constructors.PrimitiveTypeInfo) -> tyro.constructors.PrimitiveConstructorSpec[int] | None:
    """Numbers are read as ever; what is none is named in words."""

    def read(words: list[str]) -> int:
        try:
            return int(words[0])
        except ValueError:
            raise ValueError(f"it takes a whole number; got {words[0]!r}") from None

    if info.type is not int:
        return None
    return tyro.constructors.PrimitiveConstructorSpec(
        nargs=1,
        metavar="INT",
        instance_from_str=read,
        is_instance=lambda x: type(x) is int,
        str_from_instance=lambda x: [str(x)],
    )


def _recipe(name: str) -> RunConfig:
    from cdlm.recipes import RECIPES

    if name in RECIPES:
        return RECIPES[name].config
    if name.endswith(".json"):
        return read_config(Path(name))
    if (Path(name) / "run.json").is_file():
        _fail(f"{name} is a run; start it again from its settings: cdlm train {name}/run.json")
    near = [known for known in RECIPES if known.startswith(name.lower())]
    near = near or difflib.get_close_matches(name.lower(), RECIPES, n=3)
    _fail(f"there is no recipe {name!r}" + (f"; did you mean {', '.join(near)}?" if near else "; see: cdlm recipes"))
    raise AssertionError


def _fail(message: str) -> None:
    print(f"cdlm: {message}", file=sys.stderr)
    sys.exit(2)


def _console() -> Console:
    console = Console()
    return console if console.is_terminal else Console(width=160)
