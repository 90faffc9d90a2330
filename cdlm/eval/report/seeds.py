"""Models trained again from other seeds: how far a ratio of perplexities is the method's, and how far luck.

A model labelled `NAME, seed N` is another run of NAME. Texts of one run say nothing of the luck of its training, so
here the runs are the sample: the interval is Welch's, over the logarithms of their perplexities.
"""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from cdlm.eval.report.frontier import Point
from cdlm.eval.report.rows import without_seed
from cdlm.extras import require
from cdlm.metrics.gen_ppl import Interval


@dataclasses.dataclass(frozen=True)
class SeedRuns:
    """The runs of one method at one number of steps."""

    steps: int
    name: str
    ppls: tuple[float, ...]
    entropy: float
    baseline: str
    ratio: Interval | None
    """Of the geometric means, to the baseline's; None for the baseline itself."""

    @property
    def ppl(self) -> float:
        return math.exp(float(np.mean(np.log(self.ppls))))


def compare_seeds(found: Sequence[Point], baseline: str) -> list[SeedRuns]:
    """Every method with at least two runs, beside the baseline's runs, at the steps where the baseline has two."""
    baseline = without_seed(baseline)
    plain = [p for p in found if p.control == "plain" and p.steps]
    rows = []
    for steps in sorted({p.steps or 0 for p in plain}):
        groups: dict[str, list[Point]] = {}
        for point in (p for p in plain if p.steps == steps):
            groups.setdefault(without_seed(point.name), []).append(point)
        logs = {name: [float(p.log_ppl[0]) for p in own] for name, own in groups.items() if len(own) > 1}
        if baseline not in logs:
            continue
        for name in sorted(logs, key=lambda name: name != baseline):
            ratio = None if name == baseline else welch_interval(logs[name], logs[baseline])
            entropy = float(np.mean([p.entropy[0] for p in groups[name]]))
            rows.append(SeedRuns(steps, name, tuple(map(math.exp, logs[name])), entropy, baseline, ratio))
    return rows


def welch_interval(ours: Sequence[float], theirs: Sequence[float]) -> Interval:
    """exp of the difference of two means, with its 95 % interval for samples of unequal spread."""
    stats = require("scipy.stats", "eval", "an interval over seeds", "scipy")
    found = stats.ttest_ind(ours, theirs, equal_var=False)
    low, high = found.confidence_interval(0.95)
    gap = float(np.mean(ours) - np.mean(theirs))
    return Interval(math.exp(gap), math.exp(float(low)), math.exp(float(high)))
