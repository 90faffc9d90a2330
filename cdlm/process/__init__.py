"""The noising process: noise schedules, posterior bridges, and DUO's Gaussian duality."""

from cdlm.process.gaussian import Gaussian
from cdlm.process.noise import SCHEDULES, Cosine, LogLinear
from cdlm.process.process import Process, bridge_law, masked, transition, uniform, unigram

__all__ = [
    "SCHEDULES",
    "Cosine",
    "Gaussian",
    "LogLinear",
    "Process",
    "bridge_law",
    "masked",
    "transition",
    "uniform",
    "unigram",
]
