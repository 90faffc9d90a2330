"""`cdlm sample`: prompts, blanks and files in, samples out, to read or as JSON."""

import codecs
import contextlib
import dataclasses
import itertools
import json
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
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
from cdlm.sample.settings import Settings, check_value, describe_settings, flags, sources
from cdlm.text.animation import animation
from cdlm.text.options import given_settings, setting_options
from cdlm.text.template import MAX_SAMPLES, Template, has_blanks

if TYPE_CHECKING:
    from cdlm.sample.draw import State
    from cdlm.text.pipeline import Frame, Pipeline, Sample

KINDS: tuple[Literal["prompt", "infill", "rewrite"], ...] = ("prompt", "infill", "rewrite")
SPAN_LENGTH, NOISE_LEVEL = 4, 0.5

_Options = setting_options()


@dataclasses.dataclass(frozen=True)
class SampleConfig(_Options):
    """Generate text with a bundled model, a model directory, a run (its newest checkpoint, also while it is training),
    or a hub id.

    Without --prompt, --infill, --rewrite or --input it generates unconditionally. Settings of the sampler that are not
    given come from the model's generation config. Where --order, --timesteps, --corrector or --step-size ask for
    another sampler than that config, the other settings start from the defaults.
    """

    model: tyro.conf.Positional[str | None] = None
    """A model directory, a run directory, a bundled model (cdlm zoo lists them), or an id of the model hub. [the best
    bundled model]"""
    prompt: str | None = None
    """Continue this text."""
    infill: str | None = None
    """Fill the blanks of this text: ___ for a few tokens, [MASK] for one, [MASK:5] for five."""
    rewrite: str | None = None
    """Noise this text and denoise it again: the paper's conditional generation."""
    input: str | None = None
    """A file with a text on each line, or - for standard input: lines with blanks are filled, others continued. In a
    .jsonl file (or from -) a line may be an object with prompt, infill or rewrite."""
    num_samples: int = 4
    """Samples to generate, for each prompt if there are several."""
    max_length: int | None = None
    """Tokens in a sample. [the model's own]"""
    span_length: int | None = None
    """Tokens that ___ stands for. [4]"""
    noise_level: float | None = None
    """For --rewrite: the time to which the text is noised, above 0 and at most 1. [0.5]"""
    clamp: bool = False
    """For --rewrite with a uniform model: keep the tokens that the noise left alone."""
    stop_at_eos: bool = False
    """End a text at its first EOS token; EOS-padded models always do."""
    seed: int = 0
    """The same seed generates the same samples."""
    batch_size: int = 32
    """Samples per batch."""
    json: bool = False
    """Print one JSON object per line instead of text to read."""
    out: Path | None = None
    """Write the JSON lines to this file as well, each as soon as it is finished."""
    watch: bool = False
    """Show the samples resolving step by step."""
    animate: Path | None = None
    """Draw the first sample resolving, as an animated picture: FILE.svg."""
    device: Device = "auto"
    """Where to compute."""
    dtype: Literal["auto", Dtype] = "auto"
    """Precision of the network: bfloat16 on a GPU and float32 elsewhere unless given."""
    compile: bool = False
    """Compile the network: a minute at first, faster samples after."""
    tokenizer: Path | None = None
    """A tokenizer.json or a directory of GPT-2's files, for a model directory that has none."""
    trust_remote_code: bool = False
    """Run the code that a model of transformers comes with, such as LLaDA."""
    bos_framed: bool | None = None
    """Whether the model was trained on blocks that begin with BOS: then given texts begin with it, too. [what its
    directory says, or its layout implies]"""

    def __post_init__(self) -> None:
        for name, value in given_settings(self).items():
            check_value(name, value)  # before a model is opened, which may take long; `resolve` checks combinations
        for name in ("num_samples", "span_length", "batch_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"--{name.replace('_', '-')} must be at least 1 (got {value}).")
        if self.num_samples > MAX_SAMPLES:
            raise ValueError(f"--num-samples must be at most {MAX_SAMPLES:,} (got {self.num_samples}).")
        if self.max_length is not None and self.max_length < 2:
            raise ValueError(f"--max-length must be at least 2 (got {self.max_length}).")
        kinds = [name for name in (*KINDS, "input") if getattr(self, name) is not None]
        if len(kinds) > 1:
            raise ValueError(f"give one of --{' and --'.join(kinds)}, not both; --input takes texts of any kind.")
        if self.noise_level is not None and not 0 < self.noise_level <= 1:
            raise ValueError(f"--noise-level must be above 0 and at most 1 (got {self.noise_level}).")
        if (self.clamp or self.noise_level is not None) and self.rewrite is None and self.input is None:
            raise ValueError("--noise-level and --clamp only apply to --rewrite.")
        if self.prompt is not None and has_blanks(self.prompt):
            raise ValueError("--prompt is continued as it is, and this one has blanks; fill them with --infill.")
        if self.max_length is not None and (self.infill is not None or self.rewrite is not None):
            raise ValueError("the length follows from the text itself; leave out --max-length.")
        if self.watch and self.json:
            raise ValueError("--watch draws and --json prints data; choose one.")
        if self.animate is not None and self.animate.suffix != ".svg":
            raise ValueError(f"--animate writes SVG; give it a name such as {self.animate.with_suffix('.svg')}.")
        for name in ("out", "animate"):
            path: Path | None = getattr(self, name)
            if path is not None and path.exists():
                raise ValueError(f"--{name} {path} exists; choose another name, or remove it first.")
            if path is not None and not path.parent.is_dir():
                raise ValueError(f"there is no directory {path.parent} for --{name}; run mkdir -p {path.parent}.")
        if self.stop_at_eos and (self.infill is not None or self.rewrite is not None):
            raise ValueError("--stop-at-eos only applies to unconditional samples and prompts; leave it out.")
        if self.span_length is not None and self.infill is None and self.input is None:
            raise ValueError("--span-length only applies to --infill.")


def main(arguments: list[str]) -> None:
    config = parse(SampleConfig, "sample", arguments)
    prepare_torch()
    generate_samples(config, console())


def generate_samples(config: SampleConfig, console: Console) -> "list[Sample]":
    """Generate, print and keep; whatever stops it, finished samples are not lost."""
    from cdlm.text.pipeline import load

    sources = list(_sources(config))
    if (config.clamp or config.noise_level is not None) and all(source.kind != "rewrite" for source in sources):
        raise ValueError(f"--noise-level and --clamp only apply to --rewrite, and {config.input} has no such line.")
    model = load(
        config.model,
        config.device,
        config.dtype,
        config.compile,
        config.tokenizer,
        bos_framed=config.bos_framed,
        trust_remote_code=config.trust_remote_code,
    )
    settings = model.resolve(given_settings(config))
    templates = [template for source in sources for template in [_template(model, config, source)] * config.num_samples]
    frames = model.frames(templates, settings, config.seed) if config.watch or config.animate else None
    if frames is not None and len(templates) > config.batch_size:
        raise ValueError(
            f"--watch and --animate show at most --batch-size {config.batch_size} samples (got {len(templates)}); "
            "use --num-samples 1, or raise --batch-size."
        )
    side = Console(stderr=True, soft_wrap=True, markup=False, emoji=False)
    done: list[Sample] = []
    file: IO[str] | None = None
    began = time.perf_counter()
    with contextlib.ExitStack() as held:
        held.enter_context(few_threads(model.denoiser.device, model.denoiser.count()))
        try:
            if frames is not None:
                samples = iter(_watched(model, templates, frames, settings, config, console))
            else:
                show = held.enter_context(_progress(side, templates))
                stop = config.stop_at_eos or model.eos_padded
                samples = model.complete(templates, settings, config.seed, stop, config.batch_size, on_state=show)
            for sample in samples:
                if config.out and not done:
                    file = held.enter_context(config.out.open("x", encoding="utf-8"))
                done.append(sample)
                _keep(
                    _record(sample, sources[sample.index // config.num_samples], config, model, settings), config, file
                )
                if not config.watch and not config.json:
                    console.print(Rule(f"{sample.index}"))
                    console.print(sample.text, markup=False, emoji=False, highlight=False, soft_wrap=True)
        except KeyboardInterrupt:
            where = f" and kept in {config.out}" if done and config.out else ""
            side.print(f"cdlm: interrupted; {len(done)} of {len(templates)} samples are finished{where}")
            sys.exit(130)
    seconds = time.perf_counter() - began
    line = _summary(model, config, settings, templates, done, seconds)
    (side if config.json else console).print(line, highlight=False, markup=False, emoji=False)
    if config.animate:
        side.print(f"{config.animate} shows the first sample resolving; open it in a browser")
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


def _template(model: "Pipeline", config: SampleConfig, source: Source) -> Template:
    try:
        if source.kind == "prompt":
            return model.continuations([source.text], max_length=config.max_length)[0]
        if source.kind == "infill":
            return model.infillings([source.text], span_length=config.span_length or SPAN_LENGTH)[0]
        return model.rewritings([source.text], noise_level=config.noise_level or NOISE_LEVEL, clamp=config.clamp)[0]
    except ValueError as error:
        raise ValueError(f"{source.where}: {error}" if source.where else str(error)) from None


def _record(
    sample: "Sample", source: Source, config: SampleConfig, model: "Pipeline", settings: Settings
) -> dict[str, Any]:
    """Everything about a sample: the input, the output, and the complete settings that generate it again."""
    about = {source.kind: source.text, "seed": config.seed, "model": model.name}
    return {**source.more, **dataclasses.asdict(sample), **about, "sampling": dataclasses.asdict(settings)}


def _keep(record: dict[str, Any], config: SampleConfig, file: IO[str] | None) -> None:
    """One JSON line to the file, flushed, and to standard output if asked."""
    if file is not None:
        print(json.dumps(record, ensure_ascii=False), file=file, flush=True)
    if config.json:
        print(json.dumps(record, ensure_ascii="utf" not in (sys.stdout.encoding or "").lower()), flush=True)


@contextlib.contextmanager
def _progress(console: Console, templates: Sequence[Template]) -> Iterator[Any]:
    """A bar that moves with the steps of each batch."""
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("generating", total=len(templates))
        finished = size = 0

        def show(state: "State", batch: int) -> None:
            nonlocal finished, size
            if not state.step:  # a new batch
                finished, size = finished + size, batch
            progress.update(task, completed=finished + size * state.step / max(1, state.num_steps or 0, state.step))

        yield show


def _watched(
    model: "Pipeline",
    templates: Sequence[Template],
    frames: "Iterable[Frame]",
    settings: Settings,
    config: SampleConfig,
    console: Console,
) -> "list[Sample]":
    """Draw every state over the last one; where there is no terminal, below it. Or keep them all for a picture."""
    from cdlm.text.pipeline import Sample

    before: Frame | None = None
    states = []
    with contextlib.ExitStack() as held:
        drawn = config.watch and console.is_terminal
        live = held.enter_context(Live(console=console, auto_refresh=False)) if drawn else None
        for frame in frames:
            states += [frame.token_ids[0]] if config.animate else []
            if live is not None:
                live.update(picture(model, templates, frame, before), refresh=True)
                time.sleep(min(0.15, 3 / (frame.num_steps or 20)))  # a small model would flash by
            elif config.watch:
                console.print(picture(model, templates, frame, before))
            before = frame
    assert before is not None
    if config.animate:
        caption = f"{model.name}, {', '.join(describe_settings(settings))}"
        drawn_text = animation(model, templates[0], states, caption)
        config.animate.write_text(drawn_text, encoding="utf-8")
    samples = []
    for k, (template, ids) in enumerate(zip(templates, before.token_ids, strict=True)):
        ids = model.finished(ids, template) if config.stop_at_eos or model.eos_padded else ids
        samples.append(Sample(k, template.text(ids, model.decode), ids, before.nfe[k]))
    return samples


def picture(model: "Pipeline", templates: Sequence[Template], frame: "Frame", before: "Frame | None") -> Group:
    """The texts of a frame: masks dim, tokens of this step bright."""
    of = f" of {frame.num_steps}" if frame.num_steps else ""
    parts: list[Rule | Line] = []
    for k, (template, ids) in enumerate(zip(templates, frame.token_ids, strict=True)):
        old = ids if before is None else before.token_ids[k]
        line = Line(template.pieces[0] if template.spans else "")
        spans = template.spans or [(template.prefix, len(template.token_ids) - template.suffix)]
        for number, (begin, end) in enumerate(spans):
            lent = template.ends_in_space(line.plain)
            styled = [
                (_style(model, ids, old, j), ids[j])
                for j in range(template.first_of_text(ids, begin), min(end, len(ids)))
            ]
            for style, run in itertools.groupby(styled, lambda pair: pair[0]):
                shown = model.decode([i for _, i in run]).replace(END, "∎")
                line.append(shown.removeprefix(" ") if lent else shown, style)
                lent = False
            if template.spans and len(ids) >= end:
                line.append(template.pieces[number + 1])
        parts += [Rule(f"text {k}, step {frame.step}{of}"), line]
    return Group(*parts)


def _style(model: "Pipeline", ids: list[int], old: list[int], j: int) -> str:
    if ids[j] >= model.denoiser.vocab:
        return "dim"
    return "bold green" if j >= len(old) or old[j] != ids[j] else ""


def _summary(
    model: "Pipeline",
    config: SampleConfig,
    settings: Settings,
    templates: Sequence[Template],
    done: "list[Sample]",
    seconds: float,
) -> str:
    """What it took, and the settings with their origin. Tokens that were given do not count."""
    import torch

    from cdlm.metrics.diversity import entropy

    generated = sum(template.num_generated for template in templates)
    nfe = sum(sample.nfe for sample in done) / len(done)
    nats = sum(float(entropy(torch.tensor([sample.token_ids]))) for sample in done if sample.token_ids) / len(done)
    line = f"{model.name}: {len(done)} sample{'' if len(done) == 1 else 's'}, NFE {nfe:.4g}, entropy {nats:.2f} nats"
    if not config.watch:  # drawing takes longer than sampling
        line += f"; {generated:,} tokens in {seconds:.2f} s, {generated / seconds:,.0f} tok/s"
    if config.model is None:
        line = f"no model was named: {model.name} is bundled with cdlm (see cdlm zoo)\n{line}"
    origins = sources(settings, given_settings(config), model.generation_config)
    by_source: dict[str, dict[str, Any]] = {}
    for name, source in origins.items():  # a default is worth a word where the model recommends another value
        value = getattr(settings, name)
        if value is not None and (source != "default" or name == "steps" or name in model.generation_config):
            by_source.setdefault(source, {})[name] = value
    return f"{line}\nsettings: {'; '.join(f'{flags(some)} ({source})' for source, some in by_source.items())}"
