"""A sample resolving, as one animated SVG file for a page, a talk or a README.

The finished text is laid out once, and every position has a history: masked or noise, then the tokens that were drawn,
coloured by the step. The animation is pure CSS: readers who prefer reduced motion see the finished text.
"""

import dataclasses
import html
import itertools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from cdlm.text.template import Template

if TYPE_CHECKING:
    from cdlm.text.pipeline import Pipeline

COLUMNS = 88
_CHAR_WIDTH = 8.0
_LINE_HEIGHT = 24.0
_MARGIN = 22.0
_STEP_SECONDS = 0.6  # for one step, unless all of them would take longer than
_MAX_SECONDS = 6.0
_FINAL_SECONDS = 4.0  # for which the finished text stays
_STYLE = """
svg{--paper:#fff;--ink:#1d1e24;--soft:#5b5d68;--blank:#e2e0da;--light:.95;--fall:.21;--rich:.085}
@media (prefers-color-scheme:dark){svg{--paper:#1d1f25;--ink:#f0efeb;--soft:#a6a8b3;--blank:#33353e;--light:.52;
--fall:.18;--rich:.075}}
text{font:13.3px ui-monospace,Menlo,Consolas,"DejaVu Sans Mono",monospace;white-space:pre;fill:var(--ink)}
.soft,.noise text{fill:var(--soft)}.noise text{font-style:italic}.blank{fill:var(--blank)}
.when{fill:oklch(calc(var(--light) - var(--fall)*var(--w)) var(--rich) calc(100 + 185*var(--w)))}
.gone{opacity:0}
"""

Interval = tuple[int, int | None]
"""The first step at which something is visible, and the first at which it is not any more; None: to the end."""


@dataclasses.dataclass(frozen=True)
class Segment:
    """A part of the finished text within one token and one line."""

    position: int
    row: int
    column: int
    text: str


@dataclasses.dataclass(frozen=True)
class Appearance:
    """What stands at a position for a while."""

    piece: str | None
    """None where it is masked."""
    steps: Interval
    given: bool

    @property
    def kind(self) -> str:
        if self.piece is None:
            return "blank"
        if self.given:
            return "given"
        return "when" if self.steps[0] else "noise"


def animation(model: "Pipeline", template: Template, frames: Sequence[Sequence[int]], caption: str = "") -> str:
    """The SVG of a sample, given its token ids at every step; `caption` stands beneath."""
    shown = [_visible_pieces(model, template, token_ids) for token_ids in frames]
    final = [piece or "" for piece in shown[-1]]
    histories = [_history(shown, frames, template, position) for position in range(len(final))]
    segments = layout(final)
    last = max(1, len(frames) - 1)
    pace = min(_STEP_SECONDS, _MAX_SECONDS / last)
    seconds = last * pace + _FINAL_SECONDS
    rows = 1 + max((segment.row for segment in segments), default=0)
    width = COLUMNS * _CHAR_WIDTH + 2 * _MARGIN
    height = rows * _LINE_HEIGHT + 2 * _MARGIN + _LINE_HEIGHT
    groups: dict[tuple[Interval, str], list[tuple[Segment, str | None]]] = {}
    for segment in segments:
        for appearance in histories[segment.position]:
            text = segment.text if appearance.steps[1] is None else appearance.piece
            groups.setdefault((appearance.steps, appearance.kind), []).append((segment, text))
    view = f'viewBox="0 0 {width:g} {height:g}"'
    body: list[str] = []
    for (steps, kind), members in sorted(groups.items(), key=lambda item: str(item[0])):
        body += _group(steps, kind, members, last)
    foot = f'y="{height - _MARGIN / 2:g}" class="soft"'
    counter: list[Interval] = [(step, step + 1) for step in range(last)] + [(last, None)]
    for steps in counter:
        label = f'<text x="{width - _MARGIN:g}" {foot} text-anchor="end">step {steps[0]} of {last}</text>'
        body += [f'<g class="{_class_names(steps)}">{label}</g>']
    intervals = dict.fromkeys([*(steps for steps, _ in groups), *counter])
    keyframes = "".join(_keyframes(steps, pace, seconds) for steps in intervals)
    alt = html.escape("".join(final).strip(), quote=True)
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" {view} role="img" aria-label="{alt}">',
            f"<style>{_STYLE}@media (prefers-reduced-motion:no-preference){{{keyframes}}}</style>",
            f'<rect width="{width:g}" height="{height:g}" rx="10" style="fill:var(--paper)"/>',
            *body,
            f'<text x="{_MARGIN:g}" {foot}>{html.escape(caption)}</text>',
            "</svg>\n",
        ]
    )


def layout(pieces: Sequence[str], columns: int = COLUMNS) -> list[Segment]:
    """The pieces of a text in lines of so many columns, broken between words where that is possible."""
    characters = [(position, character) for position, piece in enumerate(pieces) for character in piece]
    row = 0
    column = 0
    segments: list[Segment] = []
    for kind, run in itertools.groupby(characters, lambda pair: _character_kind(pair[1])):
        word = list(run)
        if kind == "word" and column and column + len(word) > columns and len(word) <= columns:
            row, column = row + 1, 0
        for position, character in word:
            if segments and (kind == "line" or column >= columns):
                row, column = row + 1, 0
            if kind == "line" or (kind == "space" and not column):
                continue  # no line begins with a space, and no text with an empty line
            before = segments[-1] if segments else None
            if before and (before.position, before.row, before.column + len(before.text)) == (position, row, column):
                segments[-1] = dataclasses.replace(before, text=before.text + character)
            else:
                segments.append(Segment(position, row, column, character))
            column += 1
    return segments


def _character_kind(character: str) -> str:
    if character == "\n":
        return "line"
    return "space" if character.isspace() else "word"


def _visible_pieces(model: "Pipeline", template: Template, token_ids: Sequence[int]) -> list[str | None]:
    """The text of each token, EOS and BOS as a mark, without those that are not part of the text."""
    marks = {model.tokenizer.eos: " ∎ ", model.tokenizer.bos: " ∎ "}
    pieces = [
        marks.get(token, _printable(piece))
        for token, piece in zip(token_ids, model.tokenizer.pieces(token_ids), strict=True)
    ]
    return template.visible(token_ids, pieces)


def _printable(piece: str | None) -> str | None:
    """Without characters that XML does not allow."""
    if piece is None or piece.isprintable():
        return piece
    return "".join(_printable_character(character) for character in piece)


def _printable_character(character: str) -> str:
    if character.isprintable() or character == "\n":
        return character
    return " " if character.isspace() else "\ufffd"


def _history(
    shown: Sequence[list[str | None]], frames: Sequence[Sequence[int]], template: Template, position: int
) -> list[Appearance]:
    """What stood at a position, and when. A position that an autoregressive model has not reached counts as masked."""
    tokens = [token_ids[position] if position < len(token_ids) else None for token_ids in frames]
    history: list[Appearance] = []
    for _, run in itertools.groupby(range(len(frames)), lambda step: tokens[step]):
        steps = list(run)
        first = steps[0]
        end = None if steps[-1] == len(frames) - 1 else steps[-1] + 1
        piece = shown[first][position] if position < len(shown[first]) else None
        given = template.noise_level is None and template.token_ids[position] >= 0
        history.append(Appearance(piece, (first, end), given))
    return history


def _group(steps: Interval, kind: str, members: Sequence[tuple[Segment, str | None]], last: int) -> Iterator[str]:
    """All that is visible during the same steps, in the colour of the first of them."""
    boxes: list[str] = []
    texts: list[str] = []
    for segment, text in members:
        x = _MARGIN + segment.column * _CHAR_WIDTH
        y = _MARGIN + segment.row * _LINE_HEIGHT
        columns = len(segment.text)
        inked = len(segment.text.lstrip()) if kind == "blank" else columns
        if kind in ("blank", "when") and inked:
            side = inked * _CHAR_WIDTH
            boxes.append(f"M{x + (columns - inked) * _CHAR_WIDTH:g} {y:g}h{side:g}v{_LINE_HEIGHT - 4:g}h{-side:g}z")
        if text is not None and (text := " ".join(text[:columns].split("\n"))).strip():
            length = len(text) * _CHAR_WIDTH
            texts.append(f'<text x="{x:g}" y="{y + 14.5:g}" textLength="{length:g}">{html.escape(text)}</text>')
    colour = f' style="--w:{(steps[0] - 1) / max(1, last - 1):.3g}"' if kind == "when" else ""
    names = _class_names(steps) + (" noise" if kind == "noise" else "")
    yield f'<g class="{names}">'
    if boxes:
        yield f'<path class="{kind}"{colour} d="{"".join(boxes)}"/>'
    yield from texts
    yield "</g>"


def _class_names(steps: Interval) -> str:
    name = _animation_name(steps)
    return name if steps[1] is None else f"{name} gone"


def _animation_name(steps: Interval) -> str:
    begin, end = steps
    return f"k{begin}" if end is None else f"k{begin}-{end}"


def _keyframes(steps: Interval, pace: float, seconds: float) -> str:
    """Visible from the first step on, until it is replaced; hidden before and after."""
    begin, end = steps
    name = _animation_name(steps)
    opacities = {0.0: 0, begin * pace / seconds: 1}
    if end is not None:
        opacities[end * pace / seconds] = 0
    frames = "".join(f"{100 * time:.4g}%{{opacity:{opacity}}}" for time, opacity in opacities.items())
    return f"@keyframes {name}{{{frames}}}.{name}{{animation:{name} {seconds:g}s step-end infinite}}"
