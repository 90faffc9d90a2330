import itertools

import my_sampler
import pytest
import torch

from cdlm.process import masked, uniform
from cdlm.process.exact import posterior
from cdlm.rng import seeded
from cdlm.sample.draw import last
from cdlm.sample.generate import generate
from cdlm.sample.samplers import SAMPLERS
from cdlm.sample.settings import resolve

DATA = torch.tensor([[0.45, 0.10], [0.15, 0.30]], dtype=torch.float64)  # p(a, b): two tokens, a vocabulary of two
PROCESS = masked(2)


def law_by_enumeration(steps):
    """The law of the sampler with the exact posterior, and that of its drawing steps alone."""
    first = my_sampler.first_steps(steps)
    left, right = DATA.sum(1), DATA.sum(0)
    drawn, refined = torch.zeros(2, 2).double(), torch.zeros(2, 2).double()
    ways = (("together", 1 / first), ("left first", (1 - 1 / first) / 2), ("right first", (1 - 1 / first) / 2))
    for (a, b), (way, chance) in itertools.product(itertools.product(range(2), repeat=2), ways):
        p_a = DATA[a, b] / right[b] if way == "right first" else left[a]
        p_b = DATA[a, b] / left[a] if way == "left first" else right[b]
        drawn[a, b] += chance * p_a * p_b
        if p_a <= p_b:  # one of two tokens is drawn again, given the other
            refined[:, b] += chance * p_a * p_b * DATA[:, b] / right[b]
        else:
            refined[a, :] += chance * p_a * p_b * DATA[a, :] / left[a]
    return refined, drawn


def samples(steps, n=60_000, **more):
    settings = resolve({"sampler": "refine", "steps": steps}, PROCESS)
    x = PROCESS.start(2, seeded(0, batch=n))
    return generate(posterior(DATA.flatten(), PROCESS, 2), PROCESS, x, settings, seeded(1, batch=n), **more)


@pytest.mark.parametrize("steps", [2, 3, 4, 16])
def test_its_law_is_the_enumerated_one(steps):
    refined, drawn = law_by_enumeration(steps)
    assert abs(refined.sum() - 1) < 1e-12
    assert (refined - drawn).abs().max() > 0.02  # so that the test below can tell the two apart
    x = last(samples(steps)).x
    found = torch.bincount(2 * x[:, 0] + x[:, 1], minlength=4).view(2, 2) / len(x)
    assert (found - refined).abs().max() < 0.009


def test_states_count_steps_and_evaluations():
    states = list(samples(8, n=64, watch=True))
    assert [state.step for state in states] == list(range(len(states)))
    assert all(state.step <= state.num_steps == 8 for state in states)
    assert set(states[-1].nfe) == {2, 3}  # two tokens, in one step or in two, and one of them again
    assert not states[-1].token_probs.isnan().any()
    assert (states[-1].x < PROCESS.vocab).all()


def test_a_fifth_is_drawn_again_and_nothing_else_changes():
    length, n, process = 20, 32, masked(7)
    law = seeded(2, batch=1).uniform(7)[0].log_softmax(-1)
    settings = resolve({"sampler": "refine", "steps": 8}, process)
    given = torch.zeros(n, length, dtype=torch.bool)
    given[:, :5] = True
    x = torch.where(given, 3, process.start(length, seeded(0, batch=n)))
    states = list(generate(lambda x, t: law.expand(*x.shape, 7), process, x, settings, seeded(1, batch=n), given=given))
    drawn, end = states[my_sampler.first_steps(8)].x, states[-1].x
    assert (end[:, :5] == 3).all()
    changed = (drawn != end).sum(-1)
    assert 0 < changed.max() <= 3  # of 15
    assert (end < 7).all()


def test_what_it_does_not_read_is_refused():
    row = SAMPLERS["refine"]
    assert row.fits(PROCESS)
    assert not row.fits(uniform(2))
    for more in ({"order": "dilated"}, {"final_step": "argmax"}, {"precision": "naive-fp32"}, {"timesteps": "cosine"}):
        with pytest.raises(ValueError, match="does not apply to the refine sampler"):
            resolve({"sampler": "refine", **more}, PROCESS)
    with pytest.raises(ValueError, match="uniform"):
        resolve({"sampler": "refine"}, uniform(2))
    with pytest.raises(ValueError, match="at least 2 steps"):
        last(samples(1, n=2))
