"""DUO's duality against brute force: dense Gaussians, sorted, and their argmax."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from cdlm.process import Gaussian
from cdlm.process.gaussian import distinct, largest, operator, order_statistics
from cdlm.rng import seeded
from cdlm.types import Mixture

P_MIN = 1e-6


def double(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def normals(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def chi_square(counts: Tensor, law: Tensor) -> float:
    expected = law.double() / law.sum() * counts.sum()
    statistic = ((counts - expected) ** 2 / expected).sum()
    return float(torch.special.gammaincc(torch.tensor((len(law) - 1) / 2).double(), statistic / 2))


def same_law(x: Tensor, y: Tensor) -> float:
    """p-value of the two-sample Kolmogorov-Smirnov test (its asymptotic bound)."""
    both = torch.cat([x, y]).sort().values
    cdf_x, cdf_y = (torch.searchsorted(z.sort().values, both, right=True) / len(z) for z in (x, y))
    gap = float((cdf_x - cdf_y).abs().max())
    return 2 * math.exp(-2 * gap**2 * len(x) * len(y) / (len(x) + len(y)))


def same_mean(x: Tensor, y: Tensor) -> float:
    """Smallest p-value of equal means over the columns of two samples (rows are draws)."""
    error = (x.var(0) / len(x) + y.var(0) / len(y)).sqrt()
    z = ((x.mean(0) - y.mean(0)).abs() / error).max()
    return math.erfc(float(z) / math.sqrt(2))


def latents(gamma: float, vocab: int, count: int) -> Tensor:
    """w = a x_0 + s e with x_0 = 0, dense."""
    e = normals(count, vocab)
    a, s = math.sqrt(1 / (1 + math.exp(gamma))), math.sqrt(1 / (1 + math.exp(-gamma)))
    return s * e + a * torch.nn.functional.one_hot(torch.tensor(0), vocab)


@pytest.mark.parametrize(("vocab", "gamma"), [(2, -1.0), (3, 0.5), (5, -2.0), (20, -1.5), (20, 2.0)])
def test_operator_is_the_signal_of_the_argmax(vocab, gamma):
    count = 100_000
    wins = int((latents(gamma, vocab, count).argmax(-1) == 0).sum())
    alpha = float(operator(double(gamma), vocab)[0])
    truth = alpha + (1 - alpha) / vocab
    z = (wins - count * truth) / math.sqrt(count * truth * (1 - truth))
    assert math.erfc(abs(z) / math.sqrt(2)) > P_MIN


def test_operator_for_two_tokens_in_closed_form():
    """With v = 2 the clean coordinate wins iff a + s (e_0 - e_1) > 0: P = Phi(a / (s sqrt 2)), alpha = 2 P - 1."""
    gamma = torch.linspace(-6, 4, 41, dtype=torch.float64)
    ratio = torch.exp(-gamma / 2)
    alpha, slope = operator(gamma, 2)
    assert torch.allclose(alpha, torch.erf(ratio / 2), atol=1e-13)
    assert torch.allclose(slope, torch.exp(-(ratio**2) / 4) / math.sqrt(math.pi) * (-ratio / 2), atol=1e-13)


@pytest.mark.parametrize("vocab", [2, 7, 1000, 50_258])
def test_operator_derivative_by_differences(vocab):
    gamma = torch.linspace(-4.5, 0.5, 21, dtype=torch.float64)
    h = 1e-4
    difference = (operator(gamma + h, vocab)[0] - operator(gamma - h, vocab)[0]) / (2 * h)
    assert torch.allclose(operator(gamma, vocab)[1], difference, atol=1e-7)


@pytest.mark.parametrize("vocab", [3, 50_258])
def test_operator_falls_from_one_to_zero(vocab):
    alpha, slope = operator(torch.linspace(-8, 12, 201, dtype=torch.float64), vocab)
    assert float(alpha[0]) == pytest.approx(1, abs=1e-9)
    assert 0 < float(alpha[-1]) < 5e-3
    assert bool((alpha[1:] <= alpha[:-1] + 1e-13).all())
    assert bool((slope <= 1e-13).all())


def test_alpha_and_derivative_in_t():
    gaussian = Gaussian(11, -4.0, 1.0)
    t = torch.linspace(0, 1, 9, dtype=torch.float64)
    assert torch.allclose(gaussian.gamma(t), -4 + 5 * t)
    assert torch.allclose(gaussian.alpha(t), operator(-4 + 5 * t, 11)[0])
    h = 1e-5
    difference = (gaussian.alpha(t + h) - gaussian.alpha(t - h)) / (2 * h)
    assert torch.allclose(gaussian.derivative(t), difference, atol=1e-7)


@pytest.mark.parametrize("count", [1, 2, 10, 300])
def test_largest_of_many_gaussians(count):
    fast = largest(seeded(0, batch=1).uniform(20_000)[0], count)
    assert same_law(fast, normals(20_000, count).amax(-1)) > P_MIN


@pytest.mark.parametrize("count", [4, 50_257, 10**9])
@pytest.mark.parametrize("u", [1e-12, 0.01, 0.5, 0.999, 1 - 1e-12])
def test_largest_is_exact_in_the_far_tail(count, u):
    """count * log Phi(x) = log u, solved by bisection."""
    low, high = -40.0, 40.0
    for _ in range(200):
        middle = (low + high) / 2
        reached = count * float(torch.special.log_ndtr(double(middle))) > math.log(u)
        low, high = (low, middle) if reached else (middle, high)
    assert float(largest(double(u), count)) == pytest.approx(low, rel=1e-4 if u > 0.9999 else 1e-8, abs=1e-9)


@pytest.mark.parametrize(("count", "k"), [(3, 3), (6, 4), (40, 5)])
def test_order_statistics_are_the_sorted_tail_of_many_gaussians(count, k):
    fast = order_statistics(seeded(1, batch=20_000).uniform(k), count)
    assert bool((fast[:, 1:] < fast[:, :-1]).all())
    slow = normals(20_000, count).sort(-1, descending=True).values[:, :k]
    for column in range(k):
        assert same_law(fast[:, column], slow[:, column]) > P_MIN
    # The joint law too: products of neighbours, and the gap from the first to the last.
    assert same_mean(fast[:, :-1] * fast[:, 1:], slow[:, :-1] * slow[:, 1:]) > P_MIN
    assert same_law(fast[:, 0] - fast[:, -1], slow[:, 0] - slow[:, -1]) > P_MIN


def test_order_statistics_start_with_the_largest():
    u = seeded(2, batch=100).uniform(1)
    assert torch.allclose(order_statistics(u, 50_257), largest(u, 50_257), rtol=1e-12)


@pytest.mark.parametrize(("count", "k"), [(4, 2), (4, 4), (6, 3)])
def test_distinct_is_uniform_over_ordered_selections(count, k):
    drawn = distinct(seeded(3, batch=30_000).uniform(k), count)
    codes = (drawn * count ** torch.arange(k)).sum(-1)
    truth = [sum(i * count**place for place, i in enumerate(p)) for p in itertools.permutations(range(count), k)]
    counts = torch.bincount(codes, minlength=count**k)[truth]
    assert int(counts.sum()) == 30_000  # nothing but selections without repetition
    assert chi_square(counts, torch.ones(len(truth), dtype=torch.float64)) > P_MIN


@settings(deadline=None, derandomize=True, max_examples=60)
@given(st.data())
def test_distinct_never_repeats(data):
    count = data.draw(st.integers(1, 30))
    k = data.draw(st.integers(1, count))
    u = data.draw(st.lists(st.floats(1e-12, 1 - 2**-53), min_size=k, max_size=k))
    drawn = distinct(torch.tensor(u, dtype=torch.float64), count).tolist()
    assert len(set(drawn)) == k
    assert min(drawn) >= 0
    assert max(drawn) < count


def dense(mixture: Mixture, vocab: int) -> Tensor:
    """A mixture as weights over the whole vocabulary."""
    spread = mixture.rest[..., None].double().expand(*mixture.rest.shape, vocab) / vocab
    return spread.scatter_add(-1, mixture.ids, mixture.weights.double())


@pytest.mark.parametrize(("tau", "gamma"), [(0.5, -1.0), (0.1, -2.0), (2.0, 0.5)])
def test_relaxed_with_all_tokens_listed_is_the_dense_softmax_in_law(tau, gamma):
    vocab, count = 5, 20_000
    x0 = torch.zeros(20, count // 20, dtype=torch.long)
    gaussian = Gaussian(vocab, gamma, 9.0)
    x_t, mixture = gaussian.relaxed(x0, torch.zeros(20).double(), tau, vocab - 1, seeded(4, batch=20))
    assert float(mixture.rest.abs().max()) == 0
    fast = dense(mixture, vocab).flatten(0, 1)
    assert torch.allclose(fast.sum(-1), torch.ones(count).double(), atol=1e-6)
    w = latents(gamma, vocab, count)
    slow = torch.softmax(w / tau, -1)
    assert same_mean(fast, slow) > P_MIN
    assert same_mean(fast**2, slow**2) > P_MIN
    assert same_mean(fast[:, :1] * fast[:, 1:], slow[:, :1] * slow[:, 1:]) > P_MIN
    assert same_mean(fast[:, 1:-1] * fast[:, 2:], slow[:, 1:-1] * slow[:, 2:]) > P_MIN
    for token in range(vocab):
        assert same_law(fast[:, token], slow[:, token]) > P_MIN
    assert same_law(fast.amax(-1), slow.amax(-1)) > P_MIN
    assert torch.equal(x_t.flatten(), fast.argmax(-1))


@pytest.mark.parametrize(("vocab", "tau", "top"), [(60, 1.0, 8), (60, 0.3, 8), (60, 0.1, 2), (6, 2.0, 3), (6, 2.0, 1)])
def test_relaxed_with_a_few_tokens_listed(vocab, tau, top):
    count, gamma = 20_000, -2.0
    x0 = torch.randint(vocab, (20, count // 20))
    t = torch.full((20,), 0.4).double()
    x_t, mixture = Gaussian(vocab, -4.0, 1.0).relaxed(x0, t, tau, top, seeded(5, batch=20))
    assert mixture.ids.shape == (20, count // 20, top + 1)
    assert torch.equal(mixture.ids[..., 0], x0)
    total = mixture.weights.sum(-1) + mixture.rest
    assert torch.allclose(total, torch.ones_like(total), atol=1e-5)
    winner = mixture.ids.gather(-1, mixture.weights.argmax(-1, keepdim=True))[..., 0]
    assert torch.equal(winner, x_t)
    assert bool((mixture.ids.sort(-1).values.diff(dim=-1) > 0).all())

    slow = torch.softmax(latents(gamma, vocab, count) / tau, -1)
    others = slow[:, 1:].sort(-1, descending=True).values
    rest = mixture.rest.flatten().double()
    # The sum over the rest is replaced by its expectation, so its mean agrees up to the curvature of the softmax.
    close = 0.02 if tau >= 1 else 0.06
    assert float(rest.mean()) == pytest.approx(float(others[:, top:].sum(-1).mean()), rel=close)
    assert float(mixture.weights[..., 0].mean()) == pytest.approx(float(slow[:, 0].mean()), rel=0.03)
    assert float(mixture.weights[..., 1].mean()) == pytest.approx(float(others[:, 0].mean()), rel=0.03)


def test_relaxed_asks_for_no_more_tokens_than_there_are():
    x0 = torch.randint(4, (2, 6))
    _, mixture = Gaussian(4).relaxed(x0, double(0.1, 0.9), 0.1, 16, seeded(0, batch=2))
    assert mixture.ids.shape[-1] == 4
    assert torch.equal(mixture.ids.sort(-1).values, torch.arange(4).expand(2, 6, 4))


def test_relaxed_argmax_has_the_marginal_of_the_uniform_process():
    vocab, gaussian = 6, Gaussian(6, -3.0, 1.0)
    x0 = torch.full((2, 20_000), 2)
    t = double(0.3, 0.8)
    x_t, _ = gaussian.relaxed(x0, t, 1e-3, 3, seeded(6, batch=2))
    for row in range(2):
        alpha = float(gaussian.alpha(t)[row])
        law = torch.full((vocab,), (1 - alpha) / vocab, dtype=torch.float64)
        law[2] += alpha
        assert chi_square(torch.bincount(x_t[row], minlength=vocab), law) > P_MIN


def test_shared_noise_has_the_right_marginals_and_joint_law():
    vocab, gaussian, count = 5, Gaussian(5, -3.0, 1.5), 20_000
    x0 = torch.full((1, count), 3)
    s, t = double(0.3), double(0.7)
    x_s, x_t = gaussian.shared(x0, s, t, seeded(7, batch=1))
    for x, time in ((x_s, s), (x_t, t)):
        alpha = float(gaussian.alpha(time))
        law = torch.full((vocab,), (1 - alpha) / vocab, dtype=torch.float64)
        law[3] += alpha
        assert chi_square(torch.bincount(x[0], minlength=vocab), law) > P_MIN
    # A token that survives until t was there at s; once lost, the same other token wins at both times.
    assert bool((x_s[x_t == x0] == 3).all())
    assert bool((x_s[(x_t != 3) & (x_s != 3)] == x_t[(x_t != 3) & (x_s != 3)]).all())

    e, clean = normals(count, vocab), torch.nn.functional.one_hot(torch.tensor(3), vocab)
    ends = [(math.exp(-float(gaussian.gamma(time)) / 2) * clean + e).argmax(-1) for time in (s, t)]
    counts = [torch.bincount(a * vocab + b, minlength=vocab**2).double() for a, b in ((x_s[0], x_t[0]), ends)]
    seen = counts[0] + counts[1] > 0
    a, b = counts[0][seen], counts[1][seen]
    statistic = ((a - b) ** 2 / (a + b)).sum()
    assert float(torch.special.gammaincc(torch.tensor((int(seen.sum()) - 1) / 2).double(), statistic / 2)) > P_MIN


def test_rows_do_not_depend_on_their_company():
    gaussian = Gaussian(9)
    x0, s, t = torch.randint(9, (4, 10)), double(0.1, 0.2, 0.3, 0.4), double(0.5, 0.6, 0.7, 0.8)
    row = torch.tensor([2])
    whole, alone = seeded(1, batch=4), seeded(1, batch=4, rows=row)
    for a, b in zip(gaussian.shared(x0, s, t, whole), gaussian.shared(x0[row], s[row], t[row], alone), strict=True):
        assert torch.equal(a[row], b)
    (x_t, many), (y_t, one) = gaussian.relaxed(x0, t, 0.1, 3, whole), gaussian.relaxed(x0[row], t[row], 0.1, 3, alone)
    assert torch.equal(x_t[row], y_t)
    assert torch.equal(many.ids[row], one.ids)
    assert torch.equal(many.weights[row], one.weights)


class Largest(TorchDispatchMode):
    """The size of the largest tensor that any operation returns."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.numel = max([self.numel] + [leaf.numel() for leaf in tree_leaves(out) if isinstance(leaf, Tensor)])
        return out


def test_no_tensor_of_vocabulary_size_for_each_position():
    gaussian, b, l, top = Gaussian(50_257), 4, 256, 16
    x0, t = torch.randint(50_257, (b, l)), torch.linspace(0.2, 0.9, b).double()
    with Largest() as size:
        gaussian.shared(x0, t / 2, t, seeded(0, batch=b))
    assert b * l <= size.numel <= 2 * b * l
    with Largest() as size:
        gaussian.relaxed(x0, t, 1e-3, top, seeded(0, batch=b))
    assert b * l * top <= size.numel <= b * l * (top + 2)
