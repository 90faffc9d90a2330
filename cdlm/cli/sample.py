"""The command `cdlm sample`: prompts, blanks and files in, texts out, to read or as JSON."""

import codecs
import contextlib
import dataclasses
import itertools
import json
import sys
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Literal

import tyro
from rich.console import Console, Group
from rich.live import Live
from rich.progress import Progress
from rich.rule import Rule
from rich.text import Text as Line

from cdlm.cli.common import console, parse, prepare_torch
from cdlm.data import END
from cdlm.devices import Device, Dtype, few_threads
from cdlm.sample.settings import Sampling, asked, flags, nearest
from cdlm.text.animation import animation
from cdlm.text.template import MOST, Draft, has_blanks

if TYPE_CHECKING:
    from cdlm.sample.plan import State
    from cdlm.text.pipeline import Frame, Model, Text

KINDS: tuple[Literal["prompt", "infill", "rewrite"], ...] = ("prompt", "infill", "rewrite")


@dataclasses.dataclass(frozen=True)
class SampleConfig(Sampling):
    """Write text with a model that comes with cdlm, a model folder, a run (its newest checkpoint, also while it is
    training), or a hub id.

    Without --prompt, --infill, --rewrite or --input it writes from nothing. A model may say how it writes best, as
    those of cdlm zoo do: that holds for what is not given here, and the last line says what it was. Where --order,
    --grid, --corrector or naive-fp32 ask for another sampler than the model's, the defaults below hold.
    """

    model: tyro.conf.Positional[str | None] = None
    """A model folder, the folder of a run, one of the models that come with cdlm (cdlm zoo lists them), or an id of the
    model hub. [the best that comes with cdlm]"""
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
    """End a text at its end-of-text token; models that fill up their texts with it always do."""
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
    animate: Path | None = None
    """Draw the first text resolving, as a picture that moves: a file.svg."""
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
        if self.num > MOST:
            raise ValueError(f"--num must be at most {MOST:,}; got {self.num}")
        if self.length is not None and self.length < 2:
            raise ValueError(f"--length must be at least 2; got {self.length}")
        kinds = [name for name in ("prompt", "infill", "rewrite", "input") if getattr(self, name) is not None]
        if len(kinds) > 1:
            raise ValueError(f"give one of --{' and --'.join(kinds)}, not both; --input takes many texts of any kind")
        if not 0 < self.noise <= 1:
            raise ValueError(f"--noise is a time in (0, 1]; got {self.noise}")
        rewriting = self.rewrite is not None or self.input is not None
        if (self.clamp or self.noise != 0.5) and not rewriting:
            raise ValueError("--noise and --clamp go with --rewrite")
        if self.prompt is not None and has_blanks(self.prompt):
            raise ValueError("--prompt is continued as it is, and this one has blanks; --infill fills them")
        if self.length is not None and (self.infill is not None or self.rewrite is not None):
            raise ValueError("the text itself says how long it is: leave out --length")
        if self.watch and self.json:
            raise ValueError("--watch draws, --json prints data: choose one")
        for name in ("out", "animate"):
            path: Path | None = getattr(self, name)
            if path is not None and path.exists():
                raise ValueError(f"{path} exists; name another --{name}, or remove it first")
            if path is not None and not path.parent.is_dir():
                raise ValueError(
                    f"there is no folder {path.parent} for --{name}; make it first: mkdir -p {path.parent}"
                )
        if self.animate is not None and self.animate.suffix != ".svg":
            raise ValueError(f"--animate writes SVG: give it a name such as {self.animate.with_suffix('.svg')}")
        if self.trim and (self.infill is not None or self.rewrite is not None):
            raise ValueError("--trim ends what is written from nothing or continued: leave it out")
        if self.width != 4 and self.infill is None and self.input is None:
            raise ValueError("--width goes with --infill")


def main(arguments: list[str]) -> None:
    words = {word.partition("=")[0].removeprefix("--").replace("-", "_") for word in arguments if word[:2] == "--"}
    given = [field.name for field in dataclasses.fields(Sampling) if field.name in words]
    config = parse(SampleConfig, "sample", arguments)
    prepare_torch()
    write_texts(config, console(), given)


def write_texts(config: SampleConfig, console: Console, given: Collection[str] | None = None) -> "list[Text]":
    """Write, print and keep; whatever stops it, finished texts are not lost.

    `given` are the settings of the sampler that were asked for by name; the model may have its own for the others.
    """
    from cdlm.text.pipeline import load

    sources = list(_sources(config))
    if (config.clamp or config.noise != 0.5) and all(source.kind != "rewrite" for source in sources):
        raise ValueError(f"--noise and --clamp are for rewriting, and {config.input} has no line to rewrite")
    model = load(config.model, config.device, config.dtype, config.compile, config.tokenizer)
    how = model.settings({name: getattr(config, name) for name in (asked(config) if given is None else given)})
    drafts = [draft for source in sources for draft in [_draft(model, config, source)] * config.num]
    model.check(drafts, how)
    frames = model.frames(drafts, how, config.seed) if config.watch or config.animate else None
    if frames is not None and len(drafts) > config.batch:
        raise ValueError(f"{len(drafts)} texts are too many to watch at once; use --num 1, or raise --batch")
    side = Console(stderr=True, soft_wrap=True, markup=False, emoji=False)
    done: list[Text] = []
    file: IO[str] | None = None
    began = time.perf_counter()
    with contextlib.ExitStack() as held:
        held.enter_context(few_threads(model.denoiser.device, model.denoiser.count()))
        try:
            if frames is not None:
                texts = iter(_watched(model, drafts, frames, how, config, console))
            else:
                show = held.enter_context(_progress(side, drafts))
                texts = model.write(drafts, how, config.seed, config.trim or model.padded, config.batch, show)
            for text in texts:
                if config.out and not done:
                    file = held.enter_context(config.out.open("x", encoding="utf-8"))
                done.append(text)
                _keep(_record(text, sources[text.index // config.num], config, model, how), config, file)
                if not config.watch and not config.json:
                    console.print(Rule(f"{text.index}"))
                    console.print(text.text, markup=False, emoji=False, highlight=False, soft_wrap=True)
        except KeyboardInterrupt:
            where = f" and kept in {config.out}" if done and config.out else ""
            side.print(f"cdlm: interrupted; {len(done)} of {len(drafts)} texts are written{where}")
            sys.exit(130)
    seconds = time.perf_counter() - began
    line = _summary(model, config, how, drafts, done, seconds)
    (side if config.json else console).print(line, highlight=False, markup=False, emoji=False)
    if config.animate:
        side.print(f"{config.animate} shows the first text resolving: open it in a browser")
    return done


@dataclasses.dataclass(frozen=True)
class Source:
    """A text of the user's, and where it stands."""

    kind: Literal["prompt", "infill", "rewrite"]
    text: str
    where: str = ""
    more: dict[str, Any] = dataclasses.field(default_factory=dict)
    """What else its line says; it goes into the result as it is."""


def _sources(config: SampleConfig) -> Iterator[Source]:
    """What is to be written."""
    if config.input is None:
        for kind in KINDS:
            if getattr(config, kind) is not None:
                yield Source(kind, getattr(config, kind))
                return
        yield Source("prompt", "")
        return
    name = "standard input" if config.input == "-" else config.input
    try:
        data = sys.stdin.buffer.read() if config.input == "-" else Path(config.input).read_bytes()
    except (FileNotFoundError, IsADirectoryError):
        raise ValueError(f"there is no file {config.input}; --prompt takes a text itself") from None
    found = False
    for number, raw in enumerate(data.removeprefix(codecs.BOM_UTF8).splitlines(), 1):
        where = f"line {number} of {name}"
        try:
            line = raw.decode()
        except UnicodeDecodeError:
            raise ValueError(f"{where} is not valid UTF-8; save it as UTF-8") from None
        if line.strip():
            found = True
            yield _source(line, where, config.input)
    if not found:
        raise ValueError(f"{name} holds no text; give one on each line")


def _source(line: str, where: str, file: str) -> Source:
    """An object of a .jsonl file or a pipe; else a text, with blanks or to be continued."""
    if not (line.lstrip().startswith("{") and (file == "-" or file.endswith(".jsonl"))):
        return Source("infill" if has_blanks(line) else "prompt", line, where)
    try:
        fields = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{where} begins like JSON and is not ({error})") from None
    kinds = [kind for kind in KINDS if isinstance(fields.get(kind), str)]
    if len(kinds) != 1:
        raise ValueError(f"{where} needs one of prompt, infill and rewrite, with a text")
    return Source(kinds[0], fields.pop(kinds[0]), where, fields)


def _draft(model: "Model", config: SampleConfig, source: Source) -> Draft:
    try:
        if source.kind == "prompt":
            return model.continuations([source.text], length=config.length)[0]
        if source.kind == "infill":
            return model.infillings([source.text], width=config.width)[0]
        return model.rewritings([source.text], t=config.noise, clamp=config.clamp)[0]
    except ValueError as error:
        raise ValueError(f"{source.where}: {error}" if source.where else str(error)) from None


def _record(text: "Text", source: Source, config: SampleConfig, model: "Model", how: Sampling) -> dict[str, Any]:
    """Everything about a text: what was asked, what was written, and how to write it again."""
    about = {source.kind: source.text, "seed": config.seed, "model": model.name}
    about |= {"sampling": asked(how, model.own)}
    return {**source.more, **dataclasses.asdict(text), **about}


def _keep(record: dict[str, Any], config: SampleConfig, file: IO[str] | None) -> None:
    """One JSON line to the file, flushed, and to standard output if asked."""
    if file is not None:
        print(json.dumps(record, ensure_ascii=False), file=file, flush=True)
    if config.json:
        print(json.dumps(record, ensure_ascii="utf" not in (sys.stdout.encoding or "").lower()), flush=True)


@contextlib.contextmanager
def _progress(console: Console, drafts: Sequence[Draft]) -> Iterator[Any]:
    """A bar that moves with the steps of each batch."""
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("writing", total=len(drafts))
        finished = size = 0

        def show(state: "State", batch: int) -> None:
            nonlocal finished, size
            if not state.step:  # a new batch
                finished, size = finished + size, batch
            progress.update(task, completed=finished + size * state.step / max(1, state.steps or 0, state.step))

        yield show


def _watched(
    model: "Model",
    drafts: Sequence[Draft],
    frames: "Iterable[Frame]",
    how: Sampling,
    config: SampleConfig,
    console: Console,
) -> "list[Text]":
    """Draw every state over the last one; where there is no terminal, below it. Or keep them all for a picture."""
    from cdlm.text.pipeline import Text

    before: Frame | None = None
    states = []
    with contextlib.ExitStack() as held:
        drawn = config.watch and console.is_terminal
        live = held.enter_context(Live(console=console, auto_refresh=False)) if drawn else None
        for frame in frames:
            states += [frame.tokens[0]] if config.animate else []
            if live is not None:
                live.update(picture(model, drafts, frame, before), refresh=True)
                time.sleep(min(0.15, 3 / (frame.steps or 20)))  # a small model would flash by
            elif config.watch:
                console.print(picture(model, drafts, frame, before))
            before = frame
    assert before is not None
    if config.animate:
        settings = ", ".join(f"{name.replace('_', '-')} {value}" for name, value in asked(how, model.own).items())
        drawn_text = animation(model, drafts[0], states, f"{model.name}, {settings}" if settings else model.name)
        config.animate.write_text(drawn_text, encoding="utf-8")
    texts = []
    for k, (draft, ids) in enumerate(zip(drafts, before.tokens, strict=True)):
        ids = model.finished(ids, draft) if config.trim or model.padded else ids
        texts.append(Text(k, draft.text(ids, model.show), ids, before.evaluations[k]))
    return texts


def picture(model: "Model", drafts: Sequence[Draft], frame: "Frame", before: "Frame | None") -> Group:
    """The texts of a frame: masks dim, tokens of this step bright."""
    of = f" of {frame.steps}" if frame.steps else ""
    parts: list[Rule | Line] = []
    for k, (draft, ids) in enumerate(zip(drafts, frame.tokens, strict=True)):
        old = ids if before is None else before.tokens[k]
        line = Line(draft.pieces[0] if draft.holes else "")
        spans = draft.holes or [(draft.lead, len(draft.ids) - draft.tail)]
        for number, (begin, end) in enumerate(spans):
            lent = draft.lends(line.plain)
            styled = [(_style(model, ids, old, j), ids[j]) for j in range(draft.begins(ids, begin), min(end, len(ids)))]
            for style, run in itertools.groupby(styled, lambda pair: pair[0]):
                shown = model.show([i for _, i in run]).replace(END, "∎")
                line.append(shown.removeprefix(" ") if lent else shown, style)
                lent = False
            if draft.holes and len(ids) >= end:
                line.append(draft.pieces[number + 1])
        parts += [Rule(f"text {k}, step {frame.step}{of}"), line]
    return Group(*parts)


def _style(model: "Model", ids: list[int], old: list[int], j: int) -> str:
    if ids[j] >= model.denoiser.vocab:
        return "dim"
    return "bold green" if j >= len(old) or old[j] != ids[j] else ""


def _summary(
    model: "Model", config: SampleConfig, how: Sampling, drafts: Sequence[Draft], done: "list[Text]", seconds: float
) -> str:
    """What it took, and how it was sampled where the model itself says so. Tokens that were given do not count."""
    import torch

    from cdlm.metrics.diversity import entropy

    written = sum(draft.written for draft in drafts)
    evaluations = sum(text.evaluations for text in done) / len(done)
    nats = sum(float(entropy(torch.tensor([text.tokens]))) for text in done if text.tokens) / len(done)
    texts = f"{len(done)} text{'s' * (len(done) > 1)}"
    line = f"{model.name}: {texts}, {evaluations:.4g} evaluations a text, entropy {nats:.2f} nats"
    if not config.watch:  # drawing takes longer than writing
        line += f"; {written:,} tokens in {seconds:.2f} s, {written / seconds:,.0f} tokens/s"
    chosen = "" if config.model is not None else f"no model was named: {model.name} comes with cdlm (see cdlm zoo)\n"
    if not model.own:
        return f"{chosen}{line}"
    said = f"with {flags(how, model.own)}"
    if how == model.settings({"steps": how.steps}):
        best = nearest(model.own, how.steps)["steps"]
        said = f"as it writes best{'' if best == how.steps else f' at {best} steps'}, {said}"
    return f"{chosen}{line}\n{said}"
