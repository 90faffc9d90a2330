"""Couplings: what each draws, and what it writes into the record for Eq. (8)."""

import dataclasses

import pytest
import torch
from torch import Tensor

from cdlm.objective import Bridge, Relaxed, Rollout, SharedNoise, TeacherForced
from cdlm.process import Cosine, Gaussian, masked, uniform, unigram
from cdlm.rng import seeded
from cdlm.types import Mixture, Pair

V = 6
P_MIN = 1e-6


def chi_square(counts: Tensor, law: Tensor) -> float:
    expected = law.double() / law.sum() * counts.sum()
    statistic = ((counts - expected) ** 2 / expected).sum()
    return float(torch.special.gammaincc(torch.tensor((len(law) - 1) / 2).double(), statistic / 2))


def times(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def data(b: int, l: int = 8) -> Tensor:
    return torch.randint(V, (b, l))


PROCESSES = {
    "masked": masked(V),
    "masked-cosine": masked(V, Cosine(0.01)),
    "uniform": uniform(V),
    "mask-and-unigram": unigram(torch.arange(1.0, V + 2), vocab=V),
}


@pytest.mark.parametrize("process", PROCESSES.values(), ids=PROCESSES.keys())
def test_bridge_records_levels_positions_and_what_is_known(process):
    x0, s, t = data(3, 50), times(0.0, 0.3, 0.6), times(0.4, 0.5, 1.0)
    pair = Bridge(process)(x0, s, t, seeded(0, batch=3))
    assert torch.equal(pair.x0, x0)
    assert torch.equal(pair.alpha_s, process.noise.alpha(s))
    assert torch.equal(pair.alpha_t, process.noise.alpha(t))
    assert torch.equal(pair.dalpha_t, process.noise.derivative(t))
    assert pair.prior is process.prior
    assert pair.input is None
    assert pair.drawn_from is None
    mass = process.prior.tolist()
    for row in range(3):
        for x_s, x_t, here, known in zip(
            pair.x_s[row].tolist(), pair.x_t[row].tolist(), pair.positions[row], pair.known[row], strict=True
        ):
            assert bool(here) == (mass[x_t] > 0)
            assert bool(known) == (mass[x_s] == 0 or row == 0)
    assert torch.equal(pair.x_s[0], x0[0])  # s = 0: the data, by the boundary condition


def test_bridge_of_masks_is_nested():
    """A mask at s was a mask at t, and a token at t is the same token at s and in the data."""
    x0, t = data(4, 200), times(0.3, 0.5, 0.8, 1.0)
    pair = Bridge(masked(V))(x0, t / 2, t, seeded(1, batch=4))
    assert bool((pair.x_t[pair.x_s == V] == V).all())
    assert torch.equal(pair.x_s[pair.x_s < V], x0[pair.x_s < V])
    assert torch.equal(pair.x_t[pair.x_t < V], x0[pair.x_t < V])


def test_rollout_is_a_hop_of_the_teachers_posterior(tiny):
    """From masks alone: a position is revealed with probability (a_s - a_t) / (1 - a_t), its token by the teacher."""
    process, b, l = masked(V), 3000, 3
    teacher = tiny(process)
    s, t = torch.full((b,), 0.4).double(), torch.full((b,), 1.0).double()
    pair = Rollout(process)(data(b, l), s, t, seeded(2, batch=b), teacher)
    rows = (pair.x_t == V).all(-1)
    assert int(rows.sum()) > 0.98 * b
    a_s, a_t = float(pair.alpha_s[0]), float(pair.alpha_t[0])
    assert pair.drawn_from is not None
    with torch.no_grad():
        law = teacher(torch.full((1, l), V), 1.0)[0].exp()
        assert torch.allclose(teacher.head(pair.drawn_from)[rows].exp(), law.expand(int(rows.sum()), l, V))
    for i in range(l):
        truth = torch.cat([law[i] * (a_s - a_t) / (1 - a_t), times((1 - a_s) / (1 - a_t))])
        assert chi_square(torch.bincount(pair.x_s[rows, i], minlength=V + 1), truth) > P_MIN


def test_rollout_keeps_what_is_visible_and_knows_what_it_reveals(tiny):
    process = masked(V)
    x0, s, t = data(4, 40), times(0.0, 0.1, 0.3, 0.5), times(0.5, 0.5, 0.6, 0.9)
    pair = Rollout(process)(x0, s, t, seeded(3, batch=4), tiny(process))
    visible = pair.x_t < V
    assert torch.equal(pair.x_t[visible], x0[visible])
    assert torch.equal(pair.x_s[visible], x0[visible])
    assert bool((pair.x_s[0] < V).all())  # at s = 0 everything is revealed
    assert torch.equal(pair.known, pair.x_s < V)
    assert bool((pair.x_s[3] == V).any())
    assert not pair.drawn_from.requires_grad


def test_rollout_needs_a_teacher():
    with pytest.raises(ValueError, match="a rollout needs a teacher: start the target network from a trained masked"):
        Rollout(masked(V))(data(1), times(0.1), times(0.5), seeded(0, batch=1))


def test_shared_noise_records_the_levels_of_the_gaussian():
    gaussian = Gaussian(V, -3.0, 1.0)
    s, t = times(0.0, 0.5), times(0.3, 0.9)
    pair = SharedNoise(uniform(V), gaussian)(data(2, 30), s, t, seeded(4, batch=2))
    assert torch.allclose(pair.alpha_s, gaussian.alpha(s))
    assert torch.allclose(pair.alpha_t, gaussian.alpha(t))
    assert torch.allclose(pair.dalpha_t, gaussian.derivative(t))
    assert bool(pair.positions.all())
    assert not bool(pair.known.any())  # even at s = 0 some noise is left
    assert pair.input is None


def test_relaxed_shows_a_mixture_and_targets_the_data():
    gaussian = Gaussian(V, -3.0, 1.0)
    x0, t = data(2, 30), times(0.3, 0.9)
    pair = Relaxed(uniform(V), gaussian, 0.1, top=3)(x0, torch.zeros(2).double(), t, seeded(5, batch=2))
    assert torch.equal(pair.x_s, x0)
    assert pair.alpha_s.tolist() == [1, 1]
    assert torch.allclose(pair.alpha_t, gaussian.alpha(t))
    assert isinstance(pair.input, Mixture)
    assert pair.input.ids.shape == (2, 30, 4)
    winner = pair.input.ids.gather(-1, pair.input.weights.argmax(-1, keepdim=True))[..., 0]
    assert torch.equal(winner, pair.x_t)


def test_teacher_forced_predicts_every_next_token():
    x0 = data(3, 9)
    pair = TeacherForced()(x0, torch.zeros(3).double(), times(0.2, 0.5, 1.0), seeded(6, batch=3))
    assert torch.equal(pair.input, x0[:, :-1])
    assert torch.equal(pair.x0, x0[:, 1:])
    assert bool(pair.positions.all())
    assert pair.prior is None


def test_a_record_at_chosen_rows():
    pair = Bridge(masked(V))(data(3, 5), times(0.1, 0.2, 0.3), times(0.5, 0.6, 0.7), seeded(7, batch=3))
    index = torch.tensor([0, 4, 5, 13, 14])
    some = pair.at(index)
    for n, place in enumerate(index.tolist()):
        row, column = divmod(place, 5)
        for name in ("x0", "x_s", "x_t", "positions", "known"):
            assert getattr(some, name)[n] == getattr(pair, name)[row, column]
        for name in ("s", "t", "alpha_s", "alpha_t", "dalpha_t"):
            assert getattr(some, name)[n] == getattr(pair, name)[row]
    assert isinstance(some, Pair)
    assert some.prior is pair.prior


@pytest.mark.parametrize("name", ["bridge", "relaxed", "rollout"])
def test_a_record_moves_as_a_whole(name, tiny):
    """Every tensor, also those of a relaxed input, and nothing else changes."""
    x0, s, t = data(2), times(0.1, 0.2), times(0.5, 0.6)
    coupling = {
        "bridge": Bridge(masked(V)),
        "relaxed": Relaxed(uniform(V), Gaussian(V), 0.1),
        "rollout": Rollout(masked(V)),
    }[name]
    pair = coupling(x0, s, t, seeded(7, batch=2), tiny(masked(V)))
    moved = pair.to(torch.device("meta"))
    for field in dataclasses.fields(Pair):
        before, after = getattr(pair, field.name), getattr(moved, field.name)
        tensors = [after] if not isinstance(after, Mixture) else [after.ids, after.weights, after.rest]
        assert (before is None) == (after is None)
        assert all(tensor.device.type == "meta" for tensor in tensors if tensor is not None)
    same = pair.to(torch.device("cpu"))
    assert torch.equal(same.x_t, pair.x_t)
    assert same.alpha_t.dtype == torch.float64


COUPLINGS = {
    "bridge-masked": Bridge(masked(V)),
    "bridge-uniform": Bridge(uniform(V)),
    "rollout": Rollout(masked(V)),
    "shared-noise": SharedNoise(uniform(V), Gaussian(V)),
    "relaxed": Relaxed(uniform(V), Gaussian(V), 1e-3),
}


@pytest.mark.parametrize("bad", [-1, V])
@pytest.mark.parametrize("coupling", COUPLINGS.values(), ids=COUPLINGS.keys())
def test_data_ids_outside_the_vocabulary_are_refused(coupling, bad, tiny):
    x0 = torch.tensor([[0, bad, 1]])
    teacher = tiny(masked(V))
    with pytest.raises(ValueError, match=r"data ids lie in \[0, 6\) for this vocabulary of 6"):
        coupling(x0, times(0.1), times(0.5), seeded(0, batch=1), teacher)


@pytest.mark.parametrize("coupling", COUPLINGS.values(), ids=COUPLINGS.keys())
def test_a_row_does_not_depend_on_its_company(coupling, tiny):
    x0, s, t = data(4), times(0.1, 0.2, 0.3, 0.4), times(0.5, 0.6, 0.7, 0.8)
    teacher = tiny(masked(V))
    whole = coupling(x0, s, t, seeded(8, batch=4), teacher)
    row = torch.tensor([2])
    alone = coupling(x0[row], s[row], t[row], seeded(8, batch=4, rows=row), teacher)
    assert torch.equal(whole.x_s[row], alone.x_s)
    assert torch.equal(whole.x_t[row], alone.x_t)


def test_couplings_print_themselves():
    assert str(Bridge(masked(V))) == "Bridge(masked)"
    assert "-4" in str(SharedNoise(uniform(V), Gaussian(V, -4.0, -1.0)))
    assert "0.001" in str(Relaxed(uniform(V), Gaussian(V), 1e-3))
