"""Corruption and bridges of every prior, against Bayes' rule on matrices that are built here."""

import dataclasses
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from cdlm.model.config import NetworkConfig
from cdlm.model.denoiser import Denoiser
from cdlm.process import Cosine, LogLinear, Process, bridge_law, masked, transition, uniform, unigram
from cdlm.process.process import DATA, PRIOR, STAY
from cdlm.rng import Rng, seeded

V = 4
P_MIN = 1e-6
LAW = torch.tensor([0.5, 0.25, 0.05, 0.2], dtype=torch.float64)
PROCESSES = {
    "masked": masked(V),
    "masked-cosine": masked(V, Cosine()),
    "uniform": uniform(V),
    "uniform-linear": uniform(V, LogLinear(0.0)),
    "unigram": unigram(LAW),
    "unigram-with-gaps": unigram(torch.tensor([0.7, 0.0, 0.3, 0.0])),
    "mask-and-unigram": unigram(torch.cat([LAW, torch.tensor([3.0]).double()]), vocab=V),
    "mask-and-uniform": unigram(torch.tensor([0.1, 0.1, 0.1, 0.1, 0.6]), vocab=V, noise=Cosine(0.01)),
}
every_process = pytest.mark.parametrize("process", PROCESSES.values(), ids=PROCESSES.keys())


def chi_square(counts: Tensor, law: Tensor) -> float:
    """p-value of counts under a law; states of probability zero must not have been counted."""
    assert int(counts[law <= 1e-15].sum()) == 0
    counts, law = counts[law > 1e-15].double(), law[law > 1e-15].double()
    if len(law) == 1:
        return 1.0
    expected = law / law.sum() * counts.sum()
    statistic = ((counts - expected) ** 2 / expected).sum()
    return float(torch.special.gammaincc(torch.tensor((len(law) - 1) / 2).double(), statistic / 2))


def kernel(process: Process, s: float, t: float) -> Tensor:
    """Q_{s->t}, written out state by state."""
    a_s, a_t = (float(process.noise.alpha(torch.tensor(time, dtype=torch.float64))) for time in (s, t))
    q = torch.zeros(process.states, process.states, dtype=torch.float64)
    for x, y in itertools.product(range(process.states), repeat=2):
        q[x, y] = (a_t / a_s) * (x == y) + (1 - a_t / a_s) * float(process.prior[y])
    return q


def bayes(process: Process, law0: Tensor, x_t: int, s: float, t: float) -> Tensor:
    """q(x_s | x_t, x_0 ~ law0), with law0 in place of x_0, by summing out."""
    joint = (law0 @ kernel(process, 0, s)) * kernel(process, s, t)[:, x_t]
    return joint / joint.sum()


@dataclasses.dataclass(frozen=True, eq=False)
class Given(Rng):
    """Noise whose every uniform is given."""

    u: Tensor | None = None

    def uniform(self, columns, device="cpu"):
        assert self.u is not None
        return self.u.expand(len(self.rows), columns)


def routes(process: Process, x_t: Tensor, stay: Tensor, s: float, t: float) -> Tensor:
    """The probabilities of DATA, STAY and PRIOR that `route` draws with, found by bisection on its uniform."""
    b, l = x_t.shape

    def drawn(u: Tensor) -> Tensor:
        return process.route(x_t, stay, s, t, Given(0, torch.arange(b), b, u))

    def edge(reached) -> Tensor:
        low, high = torch.zeros(b, l, dtype=torch.float64), torch.ones(b, l, dtype=torch.float64)
        for _ in range(60):
            middle = (low + high) / 2
            inside = reached(drawn(middle))
            low, high = torch.where(inside, middle, low), torch.where(inside, high, middle)
        return (low + high) / 2

    first = edge(lambda route: route == STAY)
    second = edge(lambda route: (route == STAY) | (route == DATA))
    law = torch.zeros(b, l, 3, dtype=torch.float64)
    law[..., DATA], law[..., STAY], law[..., PRIOR] = second - first, first, 1 - second
    return law


def possible_pairs(process: Process) -> list[tuple[int, int]]:
    """(x_0, x_t) with positive probability."""
    reach = kernel(process, 0, 0.5)
    return [(x, z) for x in range(V) for z in range(process.states) if reach[x, z] > 0]


@every_process
def test_transition_is_the_written_out_kernel_and_composes(process):
    assert torch.allclose(transition(process, 0.2, 0.7), kernel(process, 0.2, 0.7), atol=1e-15)
    product = kernel(process, 0, 0.3) @ kernel(process, 0.3, 0.6) @ kernel(process, 0.6, 0.9)
    assert torch.allclose(product, transition(process, 0.0, 0.9), atol=1e-15)


@every_process
@pytest.mark.parametrize(("s", "t"), [(0.0, 0.4), (0.3, 0.7), (0.0, 1.0), (0.89, 0.9)])
def test_routes_and_dense_bridge_are_bayes_rule_for_every_pair(process, s, t):
    pairs = torch.tensor(possible_pairs(process)).T
    x0, x_t = pairs[:1], pairs[1:]
    weight = routes(process, x_t, (x0 == x_t).double(), s, t)[0]
    one_hot = torch.eye(process.states, dtype=torch.float64)
    drawn = weight[:, DATA, None] * one_hot[x0[0]] + weight[:, STAY, None] * one_hot[x_t[0]]
    drawn = drawn + weight[:, PRIOR, None] * process.prior
    truth = torch.stack([bayes(process, one_hot[x], z, s, t) for x, z in possible_pairs(process)])
    assert torch.allclose(drawn, truth, atol=1e-12)
    dense = bridge_law(one_hot[x0[0]], x_t[0], transition(process, 0.0, s), transition(process, s, t))
    assert torch.allclose(dense, truth, atol=1e-14)


@every_process
@settings(deadline=None, derandomize=True, max_examples=15)
@given(st.lists(st.integers(1, 99), min_size=3, max_size=3, unique=True))
def test_two_hops_are_one_hop_in_law(process, percent):
    """Chapman-Kolmogorov for bridges: t -> r -> s equals t -> s."""
    s, r, t = sorted(value / 100 for value in percent)
    one_hot = torch.eye(process.states, dtype=torch.float64)
    every = torch.arange(process.states)

    def hop(x: int, late: float, early: float) -> Tensor:
        """q(x_early | x_late, x_0 = x) for every x_late, one in each row; zero where x_late cannot be."""
        law = bridge_law(
            one_hot[x].expand(process.states, -1),
            every,
            transition(process, 0.0, early),
            transition(process, early, late),
        )
        return law.nan_to_num(0.0)

    for x, z in possible_pairs(process):
        two = hop(x, t, r)[z] @ hop(x, r, s)
        assert torch.allclose(two, bayes(process, one_hot[x], z, s, t), atol=1e-12)


@every_process
@pytest.mark.parametrize("t", [0.0, 0.35, 1.0])
def test_corrupt_has_the_marginal_of_the_kernel(process, t):
    x0 = torch.arange(V).repeat(50, 200)
    x_t = process.corrupt(x0, t, seeded(1, batch=50))
    for x in range(V):
        counts = torch.bincount(x_t[x0 == x], minlength=process.states)
        assert chi_square(counts, kernel(process, 0, t)[x]) > P_MIN


@every_process
def test_each_sequence_has_its_own_time(process):
    x0 = torch.full((3, 20_000), 1)
    t = torch.tensor([0.0, 0.5, 1.0], dtype=torch.float64)
    x_t = process.corrupt(x0, t, seeded(1, batch=3))
    for row, time in enumerate(t.tolist()):
        counts = torch.bincount(x_t[row], minlength=process.states)
        assert chi_square(counts, kernel(process, 0, time)[1]) > P_MIN


@every_process
def test_start_draws_the_prior(process):
    drawn = process.start(400, seeded(2, batch=100))
    assert chi_square(torch.bincount(drawn.flatten(), minlength=process.states), process.prior) > P_MIN


@every_process
def test_bridge_from_data_draws_bayes_rule(process):
    s, t = torch.tensor([0.25] * 40).double(), torch.tensor([0.6] * 40).double()
    x0 = torch.arange(V).repeat(40, 250)
    rng = seeded(3, batch=40)
    x_t = process.corrupt(x0, t, rng("x_t"))
    x_s = process.bridge(x0, x_t, s, t, rng("x_s"))
    one_hot = torch.eye(process.states, dtype=torch.float64)
    seen = 0
    for x, z in possible_pairs(process):
        here = (x0 == x) & (x_t == z)
        if int(here.sum()) > 100:
            seen += 1
            counts = torch.bincount(x_s[here], minlength=process.states)
            assert chi_square(counts, bayes(process, one_hot[x], z, 0.25, 0.6)) > P_MIN
    assert seen >= 6
    # ... and the two ends together have the joint law of the chain.
    chain = torch.bincount((x_s * process.states + x_t)[x0 == 2], minlength=process.states**2)
    joint = kernel(process, 0, 0.25)[2][:, None] * kernel(process, 0.25, 0.6)
    assert chi_square(chain, joint.flatten()) > P_MIN


@every_process
def test_bridge_from_a_predicted_law_draws_the_plug_in_posterior(process):
    law = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64)
    padded = torch.cat([law, law.new_zeros(process.states - V)])
    states = torch.arange(process.states)
    x_t = states.repeat(40, 1000 // process.states)
    x_s = process.bridge(law.log().expand(*x_t.shape, V), x_t, 0.3, 0.8, seeded(4, batch=40))
    for z in range(process.states):
        if process.prior[z] == 0:  # the clean token is known, whatever is predicted
            assert bool((x_s[x_t == z] == z).all())
        else:
            counts = torch.bincount(x_s[x_t == z], minlength=process.states)
            assert chi_square(counts, bayes(process, padded, z, 0.3, 0.8)) > P_MIN


def test_visible_tokens_stay_even_where_the_prediction_rules_them_out():
    for process in (PROCESSES["masked"], PROCESSES["unigram-with-gaps"]):
        visible = [z for z in range(V) if process.prior[z] == 0]
        x_t = torch.tensor([visible * 20])
        law = torch.full((1, x_t.shape[1], V), 1 / (V - 1), dtype=torch.float64).scatter(-1, x_t[..., None], 0.0).log()
        assert torch.equal(process.bridge(law, x_t, 0.2, 0.7, seeded(0, batch=1)), x_t)


@every_process
def test_bridge_to_time_zero_returns_the_data(process):
    x0 = torch.arange(V).repeat(8, 50)
    rng = seeded(5, batch=8)
    x_t = process.corrupt(x0, 0.9, rng("x_t"))
    assert torch.equal(process.bridge(x0, x_t, 0.0, 0.9, rng("x_s")), x0)


def test_masked_positions_are_revealed_before_any_prediction():
    x_t = torch.where(torch.rand(4, 200) < 0.7, V, 1)
    laws = [torch.randn(4, 200, V).log_softmax(-1) for _ in range(2)]
    first, second = (masked(V).bridge(law, x_t, 0.2, 0.9, seeded(0, batch=4)) for law in laws)
    assert torch.equal(first == V, second == V)
    assert not torch.equal(first, second)
    revealed = float((first[x_t == V] != V).double().mean())
    assert revealed == pytest.approx(0.7 / 0.9, abs=0.1)


def test_rows_do_not_depend_on_their_company():
    process = PROCESSES["mask-and-unigram"]
    x0 = torch.randint(V, (6, 30))
    t = torch.linspace(0.3, 0.9, 6).double()
    x_t = process.corrupt(x0, t, seeded(9, batch=6))
    x_s = process.bridge(x0, x_t, t / 2, t, seeded(9, "b", batch=6))
    row = torch.tensor([4])
    alone = process.corrupt(x0[row], t[row], seeded(9, batch=6, rows=row))
    assert torch.equal(alone, x_t[row])
    assert torch.equal(process.bridge(x0[row], alone, t[row] / 2, t[row], seeded(9, "b", batch=6, rows=row)), x_s[row])


@every_process
def test_positions_are_those_with_prior_mass(process):
    x = torch.arange(process.states)[None]
    assert process.positions(x)[0].tolist() == [float(mass) > 0 for mass in process.prior]
    assert process.pi(x)[0].tolist() == process.prior.tolist()


def test_names_are_read_off_the_prior():
    assert {key: process.name for key, process in PROCESSES.items()} == {
        "masked": "masked",
        "masked-cosine": "masked",
        "uniform": "uniform",
        "uniform-linear": "uniform",
        "unigram": "unigram",
        "unigram-with-gaps": "unigram",
        "mask-and-unigram": "unigram",
        "mask-and-uniform": "unigram",
    }
    assert unigram(torch.ones(5)).name == "uniform"
    assert masked(V).states == V + 1
    assert uniform(V).states == V


class Largest(TorchDispatchMode):
    """The size of the largest tensor that any operation returns."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                self.numel = max(self.numel, leaf.numel())
        return out


@pytest.mark.parametrize("kind", [masked, uniform, lambda v: unigram(torch.arange(1.0, v + 2), vocab=v)])
def test_no_tensor_of_vocabulary_size_for_each_position(kind):
    vocab, b, l = 50257, 8, 1024
    process = kind(vocab)
    x0 = torch.randint(vocab, (b, l))
    t = torch.linspace(0.1, 0.9, b).double()
    with Largest() as largest:
        x_t = process.corrupt(x0, t, seeded(0, batch=b))
        process.bridge(x0, x_t, t / 2, t, seeded(0, batch=b))
        process.start(l, seeded(0, batch=b))
        process.positions(x_t)
    assert b * l <= largest.numel <= max(b * l, vocab + 1)


@pytest.mark.parametrize(("s", "t"), [(0.5, 0.5), (0.7, 0.5)])
@pytest.mark.parametrize("process", [masked(V), uniform(V)], ids=["masked", "uniform"])
def test_bridges_that_do_not_go_down_are_refused(process, s, t):
    x = torch.tensor([[0, 1]])
    with pytest.raises(ValueError, match="needs s < t; swap the two"):
        process.bridge(x, x, s, t, seeded(0, batch=1))
    rows = torch.tensor([[0, 1], [0, 1]])
    with pytest.raises(ValueError, match="needs s < t"):  # one bad row among good ones
        process.bridge(rows, rows, torch.tensor([0.1, s]), torch.tensor([0.5, t]), seeded(0, batch=2))


@pytest.mark.parametrize("t", [-0.01, 1.01, float("nan"), float("inf")])
def test_times_outside_the_unit_interval_are_refused(t):
    x = torch.tensor([[0, 1]])
    with pytest.raises(ValueError, match=r"times lie in \[0, 1\], where 0 is data and 1 is noise"):
        masked(V).corrupt(x, t, seeded(0, batch=1))
    with pytest.raises(ValueError, match=r"times lie in \[0, 1\]"):
        uniform(V).corrupt(x, torch.tensor([t]), seeded(0, batch=1))
    with pytest.raises(ValueError, match=r"times lie in \[0, 1\]"):
        uniform(V).bridge(x, x, 0.0, t, seeded(0, batch=1))


@pytest.mark.parametrize("bad", [-1, V, V + 1])
def test_data_ids_outside_the_vocabulary_are_refused(bad):
    x0 = torch.tensor([[0, bad, 1]])
    for process in PROCESSES.values():
        for call in (
            lambda p: p.corrupt(x0, 0.5, seeded(0, batch=1)),
            lambda p: p.bridge(x0, torch.zeros_like(x0), 0.2, 0.5, seeded(0, batch=1)),
        ):
            with pytest.raises(ValueError, match=r"data ids lie in \[0, 4\) for this vocabulary of 4") as error:
                call(process)
            assert ("the mask (4) is noise, not data" in str(error.value)) == (process.states > V)


@pytest.mark.parametrize("size", [V - 1, V + 2])
def test_priors_of_the_wrong_size_are_refused(size):
    with pytest.raises(ValueError, match="give 4 entries, or 5 with the mask last"):
        Process(V, torch.full((size,), 1 / size))


@pytest.mark.parametrize(
    "prior", [[0.5, 0.6, 0, 0], [0.5, -0.1, 0.3, 0.3], [0.2, 0.2, 0.2, 0.2], [float("nan"), 1, 0, 0]]
)
def test_priors_that_are_no_law_are_refused(prior):
    with pytest.raises(ValueError, match="add up to 1; divide it by its sum"):
        Process(V, torch.tensor(prior))


@pytest.mark.parametrize("law", [[0.0, 0.0], [-1.0, 3.0], [float("inf"), 1.0]])
def test_unigram_laws_that_cannot_be_normalised_are_refused(law):
    with pytest.raises(ValueError, match="a prior is a distribution"):
        unigram(torch.tensor(law))


def test_unigram_divides_counts_by_their_sum():
    assert unigram(torch.tensor([3.0, 1.0])).prior.tolist() == [0.75, 0.25]


def test_special_tokens_stay_visible_and_get_no_probability() -> None:
    process = dataclasses.replace(masked(6), special=(0, 4))
    x0 = torch.arange(6).repeat(200, 2)
    x_t = process.corrupt(x0, 1.0, seeded(0, "special", batch=200))
    assert bool((x_t[process.is_special(x0)] == x0[process.is_special(x0)]).all())
    assert bool((x_t[~process.is_special(x0)] == 6).float().mean() > 0.99)
    x_s = process.bridge(x0, x_t, 0.5, 1.0, seeded(1, "special", batch=200))
    assert bool((x_s[process.is_special(x0)] == x0[process.is_special(x0)]).all())
    torch.manual_seed(0)
    denoiser = Denoiser(NetworkConfig(16, 1, 2, 8, 0.0), process)
    probs = denoiser(x_t[:2], 1.0).exp()
    masks = x_t[:2] == 6
    assert bool((probs[masks][:, [0, 4]] == 0).all())
    torch.testing.assert_close(probs.sum(-1), torch.ones(2, 12))
    with pytest.raises(ValueError, match="only an absorbing process"):
        dataclasses.replace(uniform(6), special=(0,))
    with pytest.raises(ValueError, match=r"must lie in \[0, 6\)"):
        dataclasses.replace(masked(6), special=(6,))
