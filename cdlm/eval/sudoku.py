"""The task `sudoku`: likelihood, validity, coverage and solving accuracy of a model of Sudoku grids.

Validity alone proves little: a model that knows one grid by heart is always valid. So it stands beside the likelihood
of the sampler in nats per grid, and beside measures of coverage whose values for uniform grids are known.
"""

import functools
import itertools
import math
import time
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from cdlm.data.sudoku import (
    GIVENS,
    LISTED,
    SIDES,
    Grids,
    all_grids,
    make_puzzles,
    num_grids,
    reduced_grids,
    sample_grids,
    valid_grids,
)
from cdlm.devices import few_threads
from cdlm.eval.cells import EvalCell
from cdlm.eval.config import EvalConfig
from cdlm.eval.results import ResultRow
from cdlm.metrics.gen_ppl import bootstrap_mean
from cdlm.metrics.likelihood import repeated_nelbo
from cdlm.metrics.sampler_likelihood import likelihood_obstacle, repeated_sampler_nats
from cdlm.model.denoiser import Denoiser
from cdlm.process.process import Posterior
from cdlm.rng import seeded
from cdlm.sample.draw import last
from cdlm.sample.generate import generate
from cdlm.sample.settings import Settings, resolve

NUM_PUZZLES = 256
NUM_TEXTS = 256
"""Held-out grids whose likelihood is estimated, where not all are listed."""
_Z = 1.959963984540054


def check_sudoku(cell: EvalCell, config: EvalConfig) -> int:
    """The side of the grids that a model was trained on; refuses other models and settings without a meaning here."""
    model = cell.model
    side = math.isqrt(config.max_length or model.max_length or 0)
    if side not in SIDES or model.denoiser.vocab != side + 1 or side * side != (config.max_length or model.max_length):
        raise ValueError(
            f"the task sudoku needs a model of Sudoku grids, and {cell.label} has a vocabulary of "
            f"{model.denoiser.vocab} tokens and a length of {model.max_length}; train one with: cdlm prepare --source "
            "sudoku-4 --out data; cdlm train sudoku-4-mdlm --data data"
        )
    if cell.settings is not None and cell.settings.block_length:
        raise ValueError("--block-length has no meaning in the task sudoku, whose grids have a fixed length.")
    return side


def measure_sudoku(cell: EvalCell, config: EvalConfig) -> ResultRow:
    """The measures of one cell."""
    assert cell.settings is not None
    denoiser = cell.model.denoiser
    with few_threads(denoiser.device, denoiser.count()):
        return measure_grids(
            denoiser,
            check_sudoku(cell, config),
            cell.settings,
            cell.model.posterior,
            num_samples=config.samples_per_cell,
            seed=config.seed,
            batch_size=config.batch_size,
            likelihood_samples=config.likelihood_samples,
        )


def measure_grids(
    denoiser: Denoiser,
    side: int,
    settings: Settings,
    posterior: Posterior = "plug-in",
    *,
    num_samples: int,
    seed: int = 0,
    batch_size: int = 1024,
    likelihood_samples: int = 16,
) -> ResultRow:
    """What a sampler makes of a denoiser of grids; fields that have no meaning for it are None."""
    began = time.perf_counter()
    blank = torch.full((num_samples, side * side), -1)
    samples, nfe = _complete(denoiser, settings, blank, seed, batch_size)
    sampled = time.perf_counter() - began
    valid = valid_grids(samples)
    share, interval = share_interval(int(valid.sum()), num_samples)
    row: ResultRow = {"nfe": nfe, "valid": share, "valid_interval": interval, **coverage(samples, seed)}
    row |= _solving(denoiser, side, settings, seed, batch_size)
    row |= _likelihood(denoiser, side, settings, posterior, seed, batch_size, likelihood_samples)
    return {**row, "sample_seconds": round(sampled, 3), "seconds": round(time.perf_counter() - began, 3)}


def _complete(
    denoiser: Denoiser, settings: Settings, puzzles: Grids, seed: int, batch_size: int
) -> tuple[Grids, float]:
    """Fill the empty cells (-1); also the mean number of network evaluations."""
    process, vocab = denoiser.process, denoiser.vocab
    rng = seeded(seed, "sudoku", batch=len(puzzles))
    found, evaluations = [], 0
    for rows in torch.arange(len(puzzles)).split(batch_size):
        noise, given = rng[rows], puzzles[rows] >= 0
        if process is None:  # the first cell of a uniform grid is uniform; the model continues from it
            x = noise("first").integers(1, vocab - 1).expand(-1, puzzles.shape[1]).clone()
            given = (torch.arange(puzzles.shape[1]) < 1).expand_as(x)
        else:
            x = torch.where(given, puzzles[rows], process.start(puzzles.shape[1], noise("start")))
        device = denoiser.device
        state = last(generate(denoiser, process, x.to(device), settings, noise, given=given.to(device)))
        found.append(state.x.cpu())
        evaluations += sum(state.nfe)
    return torch.cat(found), evaluations / len(puzzles)


def share_interval(count: int, total: int) -> tuple[float, list[float]]:
    """A share and Wilson's 95 % interval of it."""
    share = count / total
    middle = (share + _Z**2 / (2 * total)) / (1 + _Z**2 / total)
    reach = _Z * math.sqrt(share * (1 - share) / total + _Z**2 / (4 * total**2)) / (1 + _Z**2 / total)
    return share, [max(0.0, middle - reach), min(1.0, middle + reach)]


def coverage(samples: Grids, seed: int = 0) -> dict[str, Any]:
    """How far samples are from uniform grids, and how far as many uniform grids would be on average (`_null`).

    `tv` (side 4): total variation between the samples and the uniform distribution over the 288 grids. `distinct`:
    different grids among the valid samples. `pair_tv` (sides 4 and 6): total variation between the joint distributions
    of the digits of two cells, averaged over all pairs; its null value is that of one draw.
    """
    side, n = math.isqrt(samples.shape[1]), len(samples)
    valid = samples[valid_grids(samples)]
    found: dict[str, Any] = {"distinct": len(valid.unique(dim=0)) / len(valid) if len(valid) else None}
    if side not in LISTED:
        return found
    grids = num_grids(side)
    found["distinct_null"] = -grids * math.expm1(n * math.log1p(-1 / grids)) / n
    if side == 4:
        found |= {"tv": total_variation(samples), "tv_null": expected_total_variation(n)}
    null = pair_total_variation(sample_grids(side, n, seed + 1))
    return {**found, "pair_tv": pair_total_variation(samples), "pair_tv_null": null}


def total_variation(samples: Grids) -> float:
    """Between samples of side 4 and the uniform distribution over all grids: half of the sum of differences, samples
    that are no grids included."""
    grids = all_grids(4)
    place = 5 ** torch.arange(16)
    known, inverse = torch.cat([grids, samples]).mul(place).sum(-1).unique(return_inverse=True)
    counts = torch.bincount(inverse[len(grids) :], minlength=len(known)).double()
    uniform = torch.bincount(inverse[: len(grids)], minlength=len(known)).double()
    return float((counts / len(samples) - uniform / len(grids)).abs().sum() / 2)


def expected_total_variation(n: int, grids: int = 288) -> float:
    """The mean of `total_variation` over n uniform grids, by de Moivre's formula for the mean of |k / n - p|."""
    p = 1 / grids
    top = math.floor(n * p) + 1
    choose = math.lgamma(n + 1) - math.lgamma(top + 1) - math.lgamma(n - top + 1)
    deviation = 2 * top * (1 - p) * math.exp(choose + top * math.log(p) + (n - top) * math.log1p(-p))
    return grids * deviation / n / 2


def pair_total_variation(samples: Grids) -> float:
    """Between the joint distributions of two cells in samples and in uniform grids, averaged over all pairs."""
    n, cells = samples.shape
    side = math.isqrt(cells)
    one_hot = torch.nn.functional.one_hot(samples, side + 1).flatten(1).float()
    joint = (one_hot.T @ one_hot / n).view(cells, side + 1, cells, side + 1).transpose(1, 2)
    difference = (joint - _pair_law(side)).abs().sum((-2, -1)) / 2
    first, second = zip(*itertools.combinations(range(cells), 2), strict=True)
    return float(difference[list(first), list(second)].mean())


@functools.cache
def _pair_law(side: int) -> Float[Tensor, "cells cells v v"]:
    """The joint distribution of two cells of a uniform grid: it depends on whether their digits are equal alone."""
    reduced = torch.from_numpy(reduced_grids(side))
    equal = torch.stack([(reduced == reduced[:, [cell]]).double().mean(0) for cell in range(side * side)])
    same = torch.eye(side, dtype=torch.float64)
    law = equal[..., None, None] * same / side + (1 - equal[..., None, None]) * (1 - same) / (side * (side - 1))
    return torch.nn.functional.pad(law, (0, 1, 0, 1)).float()


_puzzles = functools.lru_cache(maxsize=4)(make_puzzles)


def _solving(denoiser: Denoiser, side: int, settings: Settings, seed: int, batch_size: int) -> dict[str, Any]:
    """The share of puzzles that are completed to their solution; an autoregressive model cannot fill in cells."""
    if denoiser.process is None:
        return {"solved": None, "solved_interval": None, "givens": None}
    puzzles, solutions = _puzzles(side, NUM_PUZZLES, seed)
    found, _ = _complete(denoiser, settings, puzzles, seed, batch_size)
    solved, interval = share_interval(int((found == solutions).all(-1).sum()), NUM_PUZZLES)
    return {"solved": solved, "solved_interval": interval, "givens": GIVENS[side]}


def _likelihood(
    denoiser: Denoiser,
    side: int,
    settings: Settings,
    posterior: Posterior,
    seed: int,
    batch_size: int,
    likelihood_samples: int,
) -> dict[str, Any]:
    """Minus the log-likelihood of grids in nats per grid: a bound for a masked sampler of so many steps, one for
    infinitely many under another prior (`nats_steps` is None), and exact for an autoregressive model, the first cell
    included. None where there is no bound, or an infinite one."""
    process, cells = denoiser.process, side * side
    grids = (all_grids(4) if side == 4 else sample_grids(side, NUM_TEXTS, seed, valid=True)).to(denoiser.device)
    estimates = None
    if process is not None and process.absorbing:
        if likelihood_obstacle(settings, process) is None:
            estimates = repeated_sampler_nats(
                denoiser, process, grids, settings, likelihood_samples, seed, rows=batch_size
            )
    elif resolve({} if settings.steps is None else {"steps": settings.steps}, process, posterior) == settings:
        per_cell = repeated_nelbo(denoiser, grids, likelihood_samples, seed, batch_size)
        # teacher forcing scores all cells but the first, whose distribution is uniform
        estimates = per_cell * cells if process is not None else per_cell * (cells - 1) + math.log(side)
    if estimates is None or not bool(estimates.isfinite().all()):
        return {"nats": None, "nats_interval": None, "nats_steps": None}
    nats = bootstrap_mean(estimates.mean(-1).tolist())
    steps = settings.steps if process is not None and process.absorbing else None
    return {"nats": nats.value, "nats_interval": [nats.low, nats.high], "nats_steps": steps}
