"""Eq. (8) and its ingredients: times, couplings, targets, divergences, weights."""

from cdlm.objective.coupling import Bridge, Coupling, Ordered, Relaxed, Rollout, SharedNoise, TeacherForced, pair_of
from cdlm.objective.divergence import (
    DIVERGENCES,
    ClosedForm,
    Divergence,
    divergence,
    jsd,
    kl,
    rate_kl,
    reverse_kl,
    tv,
)
from cdlm.objective.loss import Loss, Objective, Reduction, Term
from cdlm.objective.target import Data, Dense, Network, Revealed, Target
from cdlm.objective.times import MAX_STEP, TimePairs, Times, step_scheduler
from cdlm.objective.weight import inverse_noise, inverse_step, unit
from cdlm.types import Pair

__all__ = [
    "DIVERGENCES", "MAX_STEP", "Bridge", "ClosedForm", "Coupling", "Data", "Dense", "Divergence", "Loss", "Network",
    "Objective", "Ordered", "Pair", "Reduction", "Relaxed", "Revealed", "Rollout", "SharedNoise", "Target",
    "TeacherForced", "Term", "TimePairs", "Times", "divergence", "inverse_noise", "inverse_step", "jsd", "kl",
    "pair_of", "rate_kl", "reverse_kl", "step_scheduler", "tv", "unit",
]  # fmt: skip
