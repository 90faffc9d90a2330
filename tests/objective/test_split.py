"""The rows of the global batch among the terms: unbiased, complete, and the same on one process and on many."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cdlm.objective import Objective, Term, Times
from cdlm.objective.coupling import TeacherForced
from cdlm.objective.loss import split, stack
from cdlm.objective.target import Data
from cdlm.objective.weight import unit
from cdlm.rng import seeded
from cdlm.schedules import constant
from cdlm.types import Mixture

shares = st.lists(st.integers(0, 20).map(lambda i: i / 8), min_size=1, max_size=4).filter(any)


@settings(deadline=None, derandomize=True, max_examples=80)
@given(shares, st.integers(1, 40), st.integers(0, 1000))
def test_every_row_is_given_exactly_once_and_has_its_own_stratum(share, batch, seed):
    parts = split(share, seeded(seed, batch=batch))
    assert sorted(torch.cat([rows for rows, _, _ in parts]).tolist()) == list(range(batch))
    for part, (rows, stratum, strata) in zip(share, parts, strict=True):
        assert len(rows) == strata
        assert sorted(stratum.tolist()) == list(range(strata))
        assert abs(strata - batch * part / sum(share)) < 1 + 1e-9
        assert part > 0 or strata == 0


@pytest.mark.parametrize("share", [[0.6, 0.4], [1.0, 0.4], [0.05, 0.15, 0.8], [0.5, 0.0, 0.5]])
def test_expected_rows_are_proportional_to_the_share(share):
    """Systematic rounding: each count is one of two neighbours, with the right probability."""
    batch, seeds = 3, 600
    counts = torch.tensor([[strata for _, _, strata in split(share, seeded(s, batch=batch))] for s in range(seeds)])
    for column, part in zip(counts.T.double(), share, strict=True):
        truth = batch * part / sum(share)
        variance = (truth - math.floor(truth)) * (math.floor(truth) + 1 - truth)
        # A middle term has two random edges; its variance is at most twice as large.
        z = abs(float(column.mean()) - truth) / math.sqrt(max(2 * variance, 1e-18) / seeds)
        assert z < 4.9


@settings(deadline=None, derandomize=True, max_examples=40)
@given(shares, st.integers(0, 1000), st.sampled_from(["blocks", "strides"]))
def test_ranks_together_are_one_process(share, seed, cut):
    batch, pieces = 24, 4
    whole = split(share, seeded(seed, "k", batch=batch))
    rows = torch.arange(batch)
    mine = rows.view(pieces, -1) if cut == "blocks" else rows.view(-1, pieces).T
    owner = {}
    for local in mine:
        for term, (index, stratum, strata) in enumerate(split(share, seeded(seed, "k", batch=batch, rows=local))):
            assert strata == whole[term][2]
            owner.update({int(local[i]): (term, int(k)) for i, k in zip(index, stratum, strict=True)})
    truth = {
        int(i): (term, int(k)) for term, (index, ks, _) in enumerate(whole) for i, k in zip(index, ks, strict=True)
    }
    assert owner == truth


@pytest.mark.parametrize("pieces", [2, 4, 8, 16])
@pytest.mark.parametrize("cut", ["blocks", "strides"])
@pytest.mark.parametrize("share", [[0.6, 0.4], [0.8, 0.2], [0.5, 0.5], [0.9, 0.1]])
def test_every_rank_gets_its_part_of_every_term(share, cut, pieces):
    batch = 512
    rows = torch.arange(batch)
    mine = rows.view(pieces, -1) if cut == "blocks" else rows.view(-1, pieces).T
    for seed in range(3):
        for local in mine:
            for part, (index, _, _) in zip(share, split(share, seeded(seed, batch=batch, rows=local)), strict=True):
                assert abs(len(index) - part * batch / pieces) <= (2 if cut == "blocks" else 6)


@pytest.mark.parametrize("share", [[0.5, -0.1], [0.0, 0.0], [-1.0]])
def test_bad_shares_are_refused(share):
    with pytest.raises(ValueError, match="shares must be >= 0, and one of them positive; got"):
        split(share, seeded(0, batch=4))


def flat(value: float):
    def cost(*, target, student, pair):
        return torch.full((len(student),), value, dtype=student.dtype)

    return cost


@pytest.mark.parametrize("share", [(0.6, 0.4), (1.0, 0.4), (0.3, 0.0)])
def test_the_loss_is_the_weighted_sum_in_expectation(share, tiny):
    """Terms of constant cost 1 and 3, so that the expectation is known: share_1 * 1 + share_2 * 3."""
    net = tiny(causal=True)
    terms = tuple(
        Term(name, Times(constant(1.0), constant(1.0)), TeacherForced(), Data(), flat(cost), unit, constant(part))
        for name, cost, part in zip("ab", (1.0, 3.0), share, strict=True)
    )
    x0 = torch.zeros(3, 2, dtype=torch.long)
    objective = Objective(terms, 10)
    seeds = 200
    losses = [objective.loss(net, None, x0, 0, seeded(seed, batch=3)) for seed in range(seeds)]
    totals = torch.stack([loss.total.detach() for loss in losses])
    truth = share[0] + 3 * share[1]
    if share[1] == 0:
        assert torch.allclose(totals, torch.full_like(totals, truth))
    else:
        assert abs(float(totals.mean()) - truth) < 4.9 * float(totals.std()) / seeds**0.5
        assert 0 < float(totals.std()) < 1
    for loss in losses[:20]:  # each term's own mean, before its share
        assert all(float(value) == pytest.approx({"a": 1, "b": 3}[name]) for name, value in loss.terms.items())


def test_plain_tokens_are_concatenated_as_they_are():
    first, second = torch.tensor([[1, 2]]), torch.tensor([[3, 4], [5, 6]])
    assert torch.equal(stack([first, second]), torch.tensor([[1, 2], [3, 4], [5, 6]]))


def test_plain_tokens_beside_relaxed_ones_are_mixtures_of_one_token():
    v, plain = 6, torch.tensor([[5, 0, 2]])
    mixture = Mixture(torch.randint(v, (2, 3, 4)), torch.rand(2, 3, 4), torch.rand(2, 3))

    def dense(x: Mixture) -> torch.Tensor:
        return x.rest[..., None].expand(*x.rest.shape, v).div(v).scatter_add(-1, x.ids, x.weights)

    for order in (0, 1):
        both = stack([mixture, plain] if order else [plain, mixture])
        assert isinstance(both, Mixture)
        hot = torch.nn.functional.one_hot(plain, v).float()
        parts = [dense(mixture), hot] if order else [hot, dense(mixture)]
        assert torch.allclose(dense(both), torch.cat(parts))
