"""A text that resolves, as a picture that moves: one SVG file for a page, a talk or a README.

The finished text is laid out once, and every place of it has a history: hidden or noise, then what the model wrote
there, coloured by the step. Nothing runs in it but style sheets: a reader who wants no motion sees the finished text.
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
_WIDE, _TALL, _EDGE = 8.0, 24.0, 22.0  # of a character, of a line, around the text
_MOTION, _HOLD = 6.0, 4.0  # seconds, at most, that the text takes; that it stays once it is finished
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
"""The steps from and before which something is seen; None: to the end."""


@dataclasses.dataclass(frozen=True)
class Segment:
    """A part of the finished text within one line, that is within one token."""

    place: int
    row: int
    column: int
    text: str


@dataclasses.dataclass(frozen=True)
class Shown:
    """What stands at a place for a while."""

    piece: str | None
    """None where it is hidden."""
    steps: Interval
    given: bool


def animation(model: "Pipeline", template: Template, frames: Sequence[Sequence[int]], caption: str = "") -> str:
    """The SVG of a text, given its tokens at every step; `caption` stands beneath."""
    shown = [_visible(model, template, ids) for ids in frames]
    final = [piece or "" for piece in shown[-1]]
    histories = [_history(shown, frames, template, place) for place in range(len(final))]
    segments = laid_out(final)
    last = max(1, len(frames) - 1)
    pace = min(0.6, _MOTION / last)
    seconds = last * pace + _HOLD
    rows = 1 + max((segment.row for segment in segments), default=0)
    wide, tall = COLUMNS * _WIDE + 2 * _EDGE, rows * _TALL + 2 * _EDGE + _TALL
    groups: dict[tuple[Interval, str], list[tuple[Segment, str | None]]] = {}
    for segment in segments:
        for one in histories[segment.place]:
            kind = "blank" if one.piece is None else "given" if one.given else "when" if one.steps[0] else "noise"
            text = segment.text if one.steps[1] is None else one.piece
            groups.setdefault((one.steps, kind), []).append((segment, text))
    body: list[str] = []
    for (steps, kind), found in sorted(groups.items(), key=lambda item: str(item[0])):
        body += _group(steps, kind, found, last)
    foot = f'y="{tall - _EDGE / 2:g}" class="soft"'
    counted: list[Interval] = [(step, step + 1) for step in range(last)] + [(last, None)]
    for steps in counted:
        right = f'<text x="{wide - _EDGE:g}" {foot} text-anchor="end">step {steps[0]} of {last}</text>'
        body += [f'<g class="{_name(steps)}">{right}</g>']
    intervals = dict.fromkeys([*(steps for steps, _ in groups), *counted])
    motion = "".join(_keyframes(steps, pace, seconds) for steps in intervals)
    label = html.escape("".join(final).strip(), quote=True)
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide:g} {tall:g}" role="img" aria-label="{label}">',
            f"<style>{_STYLE}@media (prefers-reduced-motion:no-preference){{{motion}}}</style>",
            f'<rect width="{wide:g}" height="{tall:g}" rx="10" style="fill:var(--paper)"/>',
            *body,
            f'<text x="{_EDGE:g}" {foot}>{html.escape(caption)}</text>',
            "</svg>\n",
        ]
    )


def laid_out(pieces: Sequence[str], columns: int = COLUMNS) -> list[Segment]:
    """The pieces of a text in lines of so many columns, broken between words where that is possible."""
    letters = [(place, letter) for place, piece in enumerate(pieces) for letter in piece]
    row = column = 0
    found: list[Segment] = []
    for kind, run in itertools.groupby(letters, lambda pair: _kind(pair[1])):
        word = list(run)
        if kind == "word" and column and column + len(word) > columns and len(word) <= columns:
            row, column = row + 1, 0
        for place, letter in word:
            if found and (kind == "line" or column >= columns):
                row, column = row + 1, 0
            if kind == "line" or (kind == "space" and not column):
                continue  # no line begins with a space, and no text with an empty line
            before = found[-1] if found else None
            if before and (before.place, before.row, before.column + len(before.text)) == (place, row, column):
                found[-1] = dataclasses.replace(before, text=before.text + letter)
            else:
                found.append(Segment(place, row, column, letter))
            column += 1
    return found


def _kind(letter: str) -> str:
    return "line" if letter == "\n" else "space" if letter.isspace() else "word"


def _visible(model: "Pipeline", template: Template, ids: Sequence[int]) -> list[str | None]:
    """A text token by token, ends of text as a mark, without tokens that are no part of it."""
    marks = {model.tokenizer.eos: " ∎ ", model.tokenizer.bos: " ∎ "}
    pieces = [marks.get(one, _printable(piece)) for one, piece in zip(ids, model.tokenizer.pieces(ids), strict=True)]
    return template.visible(ids, pieces)


def _printable(piece: str | None) -> str | None:
    """Without signs that no XML file may hold."""
    if piece is None or piece.isprintable():
        return piece
    return "".join(
        letter if letter.isprintable() or letter == "\n" else " " if letter.isspace() else "\ufffd" for letter in piece
    )


def _history(
    shown: Sequence[list[str | None]], frames: Sequence[Sequence[int]], template: Template, place: int
) -> list[Shown]:
    """What stood at a place, and when. A causal model has not come to it at first: it is hidden as well."""
    tokens = [ids[place] if place < len(ids) else None for ids in frames]
    found: list[Shown] = []
    for _, run in itertools.groupby(range(len(frames)), lambda step: tokens[step]):
        steps = list(run)
        end = None if steps[-1] == len(frames) - 1 else steps[-1] + 1
        piece = shown[steps[0]][place] if place < len(shown[steps[0]]) else None
        given = template.noise_level is None and template.token_ids[place] >= 0
        found.append(Shown(piece, (steps[0], end), given))
    return found


def _group(steps: Interval, kind: str, found: Sequence[tuple[Segment, str | None]], last: int) -> Iterator[str]:
    """All that is seen in one stretch of steps, in the colour of its first."""
    boxes, texts = [], []
    for segment, text in found:
        x, y = _EDGE + segment.column * _WIDE, _EDGE + segment.row * _TALL
        room = len(segment.text)
        inked = len(segment.text.lstrip()) if kind == "blank" else room
        if kind in ("blank", "when") and inked:
            side = inked * _WIDE
            boxes.append(f"M{x + (room - inked) * _WIDE:g} {y:g}h{side:g}v{_TALL - 4:g}h{-side:g}z")
        if text is not None and (text := " ".join(text[:room].split("\n"))).strip():
            length = len(text) * _WIDE
            texts.append(f'<text x="{x:g}" y="{y + 14.5:g}" textLength="{length:g}">{html.escape(text)}</text>')
    colour = f' style="--w:{(steps[0] - 1) / max(1, last - 1):.3g}"' if kind == "when" else ""
    yield f'<g class="{_name(steps)}{" noise" * (kind == "noise")}">'
    if boxes:
        yield f'<path class="{kind}"{colour} d="{"".join(boxes)}"/>'
    yield from texts
    yield "</g>"


def _name(steps: Interval) -> str:
    begin, end = steps
    return f"k{begin}-{end}" + " gone" if end is not None else f"k{begin}"


def _keyframes(steps: Interval, pace: float, seconds: float) -> str:
    """Seen from its first step on, until it is replaced; hidden before and after."""
    begin, end = steps
    name = _name(steps).split()[0]
    marks = {0.0: 0, begin * pace / seconds: 1} | ({} if end is None else {end * pace / seconds: 0})
    frames = "".join(f"{100 * at:.4g}%{{opacity:{on}}}" for at, on in marks.items())
    return f"@keyframes {name}{{{frames}}}.{name}{{animation:{name} {seconds:g}s step-end infinite}}"
