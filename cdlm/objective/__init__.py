"""Eq. (8) and its ingredients: times, couplings, targets, divergences, weights."""

from cdlm.objective.coupling import Bridge, Ordered, Relaxed, Rollout, SharedNoise, TeacherForced
from cdlm.objective.divergence import DIVERGENCES, divergence
from cdlm.objective.loss import Loss, Objective, Term
from cdlm.objective.target import Data, Network, Revealed
from cdlm.objective.times import MAX_STEP, Times, step_scheduler
from cdlm.objective.weight import inverse_noise, inverse_step, unit

__all__ = [
    "DIVERGENCES", "MAX_STEP", "Bridge", "Data", "Loss", "Network", "Objective", "Ordered", "Relaxed", "Revealed",
    "Rollout", "SharedNoise", "TeacherForced", "Term", "Times", "divergence", "inverse_noise", "inverse_step",
    "step_scheduler", "unit",
]  # fmt: skip
