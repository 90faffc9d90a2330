import itertools

import my_coupling
import pytest
import torch

from cdlm.methods import METHODS
from cdlm.model.config import SIZES
from cdlm.model.denoiser import Denoiser
from cdlm.objective import pair_of
from cdlm.process import Cosine, masked, uniform
from cdlm.rng import seeded

S, T, N = 0.3, 0.6, 40_000


def pair_for(process, width, length, n=N):
    x0 = seeded(0, "data", batch=n).integers(length, process.vocab)
    s, t = (torch.full((n,), time, dtype=torch.float64) for time in (S, T))
    return x0, my_coupling.Spans(process, width)(x0, s, t, seeded(1, batch=n))


def masks_at(process, time):
    return float(1 - process.noise.alpha(torch.tensor(time, dtype=torch.float64)))


@pytest.mark.parametrize("process", [masked(7), masked(7, Cosine())])
@pytest.mark.parametrize("width", [1, 3, 8])
def test_every_position_has_the_marginals_of_the_process(process, width):
    x0, pair = pair_for(process, width, 6)
    for x, time in ((pair.x_s, S), (pair.x_t, T)):
        assert ((x == 7).double().mean(0) - masks_at(process, time)).abs().max() < 0.012
        assert (x[x < 7] == x0[x < 7]).all()
    assert (pair.x_s[pair.x_t < 7] == pair.x_t[pair.x_t < 7]).all()  # what is visible stays


@pytest.mark.parametrize("width", [1, 2, 3])
def test_patterns_of_masks_have_their_enumerated_law(width):
    """Of three positions: over all offsets, and over the three states of each span at both ends of the hop."""
    length, process = 3, masked(7)
    _, pair = pair_for(process, width, length)
    states = {2: masks_at(process, S), 1: masks_at(process, T) - masks_at(process, S), 0: 1 - masks_at(process, T)}
    law = torch.zeros((3,) * length, dtype=torch.float64)  # masked at both ends: 2, at t alone: 1, never: 0
    for offset in range(width):
        span = [(i + offset) // width for i in range(length)]
        for each in itertools.product(states, repeat=span[-1] + 1):
            chance = torch.tensor([states[state] for state in each], dtype=torch.float64).prod() / width
            law[tuple(each[k] for k in span)] += chance
    assert abs(law.sum() - 1) < 1e-12
    state = (pair.x_s == 7).long() + (pair.x_t == 7).long()
    code = (state * torch.tensor([9, 3, 1])).sum(1)
    found = torch.bincount(code, minlength=27).view_as(law) / N
    assert (found - law).abs().max() < 0.01


def test_a_span_of_the_whole_text_is_masked_as_one():
    _, pair = pair_for(masked(7), 1000, 4, n=2_000)
    count = (pair.x_t == 7).sum(1)
    assert ((count == 0) | (count == 4)).double().mean() > 0.98  # but for a border that falls into the text


def test_the_method_has_a_loss_and_says_what_it_cannot_do():
    process = masked(50)
    x0 = seeded(0, "data", batch=8).integers(16, 50)
    denoiser = Denoiser(SIZES["tiny"], process)
    loss, plain = (
        METHODS["span-hops"](process, 100, width=3).loss(denoiser, None, x0, 0, seeded(1, batch=8), plain=plain).total
        for plain in (False, True)
    )
    assert torch.isfinite(loss)
    assert torch.allclose(loss.double(), plain.double(), rtol=1e-5)
    with pytest.raises(ValueError, match="width"):
        my_coupling.Spans(process, 0)
    with pytest.raises(ValueError, match="uniform"):
        my_coupling.Spans(uniform(50), 2)


def test_token_ids_of_another_shape_or_dtype_are_refused():
    process, s, t = masked(7), torch.tensor([S]).double(), torch.tensor([T]).double()
    x0 = torch.zeros(1, 4, dtype=torch.long)
    with pytest.raises(ValueError, match=r"the x_s of a coupling .* \(1, 4\) int64 \(got \(1, 3\) int64\)"):
        pair_of(process, x0, x0[:, 1:], x0, s, t)
    with pytest.raises(ValueError, match=r"the x_t of a coupling .* \(1, 4\) int64 \(got \(1, 4\) float32\)"):
        pair_of(process, x0, x0, x0.float(), s, t)
