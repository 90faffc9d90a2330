"""The honest comparison: perplexity at equal entropy, and the steps that a model needs to match another.

A model can lower its perplexity by sharpening what it predicts, and pays with entropy. So each model is a curve, drawn
by temperature and by top-p, and models are compared where their entropies are equal. Between measured points log
perplexity is taken as linear in entropy; beyond them nothing is claimed. Intervals resample the texts, the same ones in
every cell: text k of every cell comes from the same noise, so the cells are paired.
"""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from cdlm.eval.report.rows import Section, control_label, display_name, num_steps, unconditional_rows, uncontrolled
from cdlm.eval.results import ResultRow
from cdlm.metrics.gen_ppl import Interval, bootstrap_indices, percentile_interval

Vector = NDArray[np.float64]
NUM_ENTROPIES = 9
CONTROL_KINDS = ("T ", "top-p ")
"""Controls whose cells lie on one line."""


@dataclasses.dataclass(frozen=True)
class Point:
    """A cell on the plane: entropy and log perplexity, measured and resampled (entry 0 is the measurement)."""

    name: str
    steps: int | None
    control: str
    entropy: Vector
    log_ppl: Vector
    nfe: float


@dataclasses.dataclass(frozen=True)
class Match:
    """A model's cell beside the baseline's frontier at the same entropy."""

    steps: int
    name: str
    control: str
    entropy: float
    ppl: float
    baseline: str
    baseline_ppl: float | None
    """The best of the baseline's controls at that entropy; None beyond what was measured."""
    ratio: Interval | None
    """ppl / baseline_ppl: below 1 is a gain that sharpening does not explain."""


@dataclasses.dataclass(frozen=True)
class FrontierRatio:
    """Two sweeps against each other, over the entropies that both reach."""

    steps: int
    name: str
    baseline: str
    low: float
    high: float
    ratio: Interval


@dataclasses.dataclass(frozen=True)
class StepsToMatch:
    """The steps that a model needs to reach another's perplexity at its most steps."""

    name: str
    target: str
    target_steps: int | None
    target_nfe: float
    target_ppl: float
    steps: Interval | None
    """None: never, within the steps measured."""
    at_most: bool
    """Already reached at the fewest steps measured."""
    entropy: float | None
    """Of the model, where it gets there."""
    nfe: float | None
    """Evaluations there: more than the steps with a corrector's, fewer where nothing was left to reveal."""
    target_entropy: float

    @property
    def factor(self) -> float | None:
        """How many times fewer evaluations."""
        return None if self.nfe is None else self.target_nfe / self.nfe


def frontier_points(section: Section) -> list[Point]:
    """Every unconditional FP64 cell of a section."""
    return [_frontier_point(row) for row in unconditional_rows(section.rows)]


def _frontier_point(row: ResultRow) -> Point:
    per = row["per_sample"]
    nats, tokens, entropy = (np.array(per[key], dtype=np.float64) for key in ("nats", "tokens", "entropy"))
    draws = np.concatenate([np.arange(len(nats))[None], bootstrap_indices(len(nats)).numpy()])
    log_ppl = nats[draws].sum(-1) / np.maximum(1, tokens[draws].sum(-1))
    return Point(display_name(row), num_steps(row), control_label(row), entropy[draws].mean(-1), log_ppl, row["nfe"])


def match_entropies(found: Sequence[Point], baseline: str) -> list[Match]:
    """Every model's plain cells, and all of the baseline's own, beside the baseline's frontier.

    A cell of the baseline itself is compared with the line through its other cells of the same control: what comes out
    is the error of the interpolation, and a sharpened copy of the baseline shows no gain.
    """
    rows = []
    for n in _step_counts(found):
        base = [p for p in found if p.name == baseline and p.steps == n]
        for point in [p for p in found if p.steps == n]:
            own = point.name == baseline
            others = [p for p in base if p is not point and (not own or _same_curve(p, point))]
            if len(others) < 2 or (not own and point.control != "plain"):
                continue
            log_base = frontier_at(others, point.entropy) if not own else _interpolate(others, point.entropy)
            here = None if np.isnan(log_base[0]) else math.exp(log_base[0])
            ratio = None if here is None else _interval(np.exp(point.log_ppl - log_base))
            ppl = math.exp(point.log_ppl[0])
            rows.append(Match(n, point.name, point.control, float(point.entropy[0]), ppl, baseline, here, ratio))
    return rows


def compare_frontiers(found: Sequence[Point], baseline: str) -> list[FrontierRatio]:
    """Sweep against sweep: the mean log ratio over the entropies that both reach.

    Temperatures are compared with temperatures and top-p with top-p, and the two are averaged: else a model whose top-p
    ends earlier would be set beside another control there.
    """
    rows = []
    for n in _step_counts(found):
        base = [p for p in found if p.name == baseline and p.steps == n]
        for other in dict.fromkeys(p.name for p in found if p.steps == n and p.name != baseline):
            own = [p for p in found if p.name == other and p.steps == n]
            gaps = [gap for kind in CONTROL_KINDS if (gap := _gap(_curve(own, kind), _curve(base, kind)))]
            if gaps:
                low, high = min(low for _, low, _ in gaps), max(high for *_, high in gaps)
                mean = np.mean([gap for gap, *_ in gaps], 0)
                rows.append(FrontierRatio(n, other, baseline, low, high, _interval(np.exp(mean))))
    return rows


def _gap(own: Sequence[Point], base: Sequence[Point]) -> tuple[Vector, float, float] | None:
    """The mean log ratio of two curves in each resample, and where they were measured to overlap."""
    if min(len(own), len(base)) < 2:
        return None
    ends = [np.stack([p.entropy for p in side]) for side in (own, base)]
    low, high = np.maximum(*(h.min(0) for h in ends)), np.minimum(*(h.max(0) for h in ends))
    if low[0] >= high[0]:
        return None
    places = [
        np.minimum(low + (high - low) * share, high) for share in np.linspace(0, 1, NUM_ENTROPIES)
    ]  # not an ulp beyond
    gap = np.mean([_interpolate(own, h) - _interpolate(base, h) for h in places], 0)
    return gap, float(low[0]), float(high[0])


def frontier_at(cells: Sequence[Point], entropy: Vector) -> Vector:
    """The lowest log perplexity of any control at these entropies, one for each resample; NaN where none reaches.

    Temperatures are one curve and top-p another; the plain cell lies on both.
    """
    best = np.full_like(entropy, np.nan)
    for kind in CONTROL_KINDS:
        curve = _curve(cells, kind)
        if len(curve) > 1:
            best = np.fmin(best, _interpolate(curve, entropy))
    return best


def _curve(cells: Sequence[Point], kind: str) -> list[Point]:
    """The cells of one control, with the plain one."""
    return [p for p in cells if p.control.startswith(kind) or p.control == "plain"]


def _interpolate(curve: Sequence[Point], entropy: Vector) -> Vector:
    """The line through a curve's cells at these entropies, in each resample; NaN outside."""
    h, y = np.stack([p.entropy for p in curve], -1), np.stack([p.log_ppl for p in curve], -1)
    order = h.argsort(-1)
    h, y = np.take_along_axis(h, order, -1), np.take_along_axis(y, order, -1)
    left = np.clip((h <= entropy[:, None]).sum(-1, keepdims=True) - 1, 0, len(curve) - 2)
    h0, h1, y0, y1 = (np.take_along_axis(side, left + k, -1)[:, 0] for side in (h, y) for k in (0, 1))
    share = np.divide(entropy - h0, h1 - h0, out=np.zeros_like(h0), where=h1 > h0)
    inside = (h[:, 0] <= entropy) & (entropy <= h[:, -1]) & (h[:, 0] < h[:, -1])
    return np.where(inside, y0 + share * (y1 - y0), np.nan)


def steps_to_match(found: Sequence[Point], targets: Sequence[str]) -> list[StepsToMatch]:
    """For every model with several step counts and every target: the first steps at which it is as good."""
    plain_ = [p for p in found if p.control == "plain"]
    rows = []
    for target in targets:
        own = [p for p in plain_ if p.name == target]
        if not own:
            continue
        goal = max(own, key=lambda p: p.steps or p.nfe)
        for other in dict.fromkeys(p.name for p in plain_ if p.steps and p.name != target):
            curve = sorted((p for p in plain_ if p.name == other and p.steps), key=lambda p: p.steps or 0)
            if len(curve) < 2:
                continue
            needed = crossing([p.steps or 0 for p in curve], np.stack([p.log_ppl for p in curve], -1), goal.log_ppl)
            reached = math.isfinite(needed[0])
            entropy = nfe = None
            if reached:
                places, at = np.log([p.steps or 0 for p in curve]), math.log(needed[0])
                entropy = float(np.interp(at, places, [p.entropy[0] for p in curve]))
                nfe = math.exp(np.interp(at, places, np.log([p.nfe for p in curve])))
            rows.append(
                StepsToMatch(
                    other,
                    target,
                    goal.steps,
                    goal.nfe,
                    math.exp(goal.log_ppl[0]),
                    _interval(needed) if reached else None,
                    reached and float(needed[0]) == curve[0].steps,
                    entropy,
                    nfe,
                    float(goal.entropy[0]),
                )
            )
    return rows


def crossing(counts: Sequence[int], log_ppl: NDArray[np.float64], goal: Vector) -> Vector:
    """The first steps at which a curve is at or below a goal, log-log linear between those measured; inf if never."""
    found = []
    for y, aim in zip(log_ppl, goal, strict=True):
        below = np.nonzero(y <= aim)[0]
        if not len(below):
            found.append(math.inf)
        elif below[0] == 0:
            found.append(float(counts[0]))
        else:
            k = int(below[0])
            share = (y[k - 1] - aim) / (y[k - 1] - y[k])
            found.append(math.exp(math.log(counts[k - 1]) + share * math.log(counts[k] / counts[k - 1])))
    return np.array(found)


def choose_baseline(section: Section, wanted: str | None) -> str | None:
    """The model that others are measured by: the one asked for, or the first with a sweep, MDLM or UDLM if there."""
    rows = [row for row in unconditional_rows(section.rows) if row["process"] != "none"]
    names = list(dict.fromkeys(display_name(row) for row in rows))
    if wanted is not None:
        return wanted if wanted in names else None
    methods = {display_name(row): str((row.get("training") or {}).get("method")) for row in uncontrolled(rows)}
    return next((n for n in names if methods.get(n) in ("mdlm", "udlm")), names[0] if names else None)


def _same_curve(one: Point, two: Point) -> bool:
    """Whether two cells lie on one line: both of temperature, or both of top-p; the plain cell lies on the first."""
    kinds = [p.control.startswith("top-p") for p in (one, two)]
    return kinds[0] == kinds[1] or one.control == "plain"


def _step_counts(found: Sequence[Point]) -> list[int]:
    return sorted({p.steps for p in found if p.steps})


def _interval(draws: Vector) -> Interval:
    import torch

    return percentile_interval(float(draws[0]), torch.from_numpy(draws[1:]))
