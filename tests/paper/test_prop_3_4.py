"""Proposition 3.4: the Bayes fixed point, what identifies it, and what JSD identifies instead."""

import pytest
import torch

from cdlm.objective.divergence import jsd, kl

from .enumeration import KINDS, VOCAB, World, apply, bridged, entropy, minimise, predictor, tv, world

GRID = (0.2, 0.4, 0.6, 0.8)
EDGES = [(i, j) for j in range(len(GRID)) for i in range(j)]


class Population:
    """Eq. (5) and the max-step anchor under forward KL, exact, for predictors on a grid of times with carry-over."""

    def __init__(self, w: World) -> None:
        self.w, self.counts = w, ~w.known
        self.reverse = {(i, j): w.reverse(GRID[i], GRID[j]) for i, j in EDGES}
        self.marginal = [w.marginal(t)[:, None].expand(w.states.shape)[self.counts] for t in GRID]
        clean = (w.states < VOCAB).all(1)
        x0, x_t, i = self.counts.expand(int(clean.sum()), *w.states.shape).nonzero().T
        self.place, self.x0 = (x_t, i), w.states[clean][x0, i]
        self.joint = [w.joint(0, t)[clean][x0, x_t] for t in GRID]
        self.bayes = torch.stack([w.bayes(t) for t in GRID])

    def predictor(self, logits: torch.Tensor) -> torch.Tensor:
        return torch.where(self.w.known[..., None], self.w.tokens, logits.softmax(-1))

    def random(self, seed: int) -> torch.Tensor:
        shape = (len(GRID), *self.w.states.shape, VOCAB)
        return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 2

    def consistency(self, f: torch.Tensor) -> torch.Tensor:
        """Eq. (5) over all pairs 0 < s < t of the grid, summed over the positions that count."""
        total = f.new_zeros(())
        for (i, j), reverse in self.reverse.items():
            image = apply(reverse, f[i])[self.counts]
            total = total + (self.marginal[j] * kl(target=image.log(), student=f[j][self.counts].log())).sum()
        return total

    def anchor(self, f: torch.Tensor) -> torch.Tensor:
        """E over (x_0, x_t) of the cross entropy, for every t of the grid."""
        students = [f[j][self.place].log() for j in range(len(GRID))]
        return sum(
            (p * kl(target=self.x0, student=student)).sum() for p, student in zip(self.joint, students, strict=True)
        )


@pytest.mark.parametrize("noise", ["log-linear", "cosine"])
@pytest.mark.parametrize("l", [1, 2, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_posterior_marginal_is_a_fixed_point(kind, l, noise):
    """f* = C_{s<-t} f* for 0 <= s < t, through the package's bridge, for a data law that is no product."""
    w = world(kind, l, noise)
    for s, t in [(0.0, 0.4), (0.05, 0.9), (0.3, 0.5), (0.6, 1.0)]:
        f_s = w.tokens if s == 0 else w.bayes(s)
        torch.testing.assert_close(apply(bridged(w, s, t), f_s), w.bayes(t), rtol=0, atol=1e-9)


@pytest.mark.parametrize("kind", KINDS)
def test_minimiser_of_the_expected_forward_kl_is_the_mean(kind):
    """At each x_t: argmin_Q E[KL(P || Q)] = C f for random targets P = f(x_s, s), and f* for the edge s = 0."""
    w, s, t = world(kind), 0.3, 0.8
    f = predictor(w, 1)
    clean = (w.states < VOCAB).all(1)
    for x in (0, len(w.states) // 2, len(w.states) - 1):
        reverse = w.reverse(s, t)[x]
        posterior = w.reverse(0, t)[x, clean]
        for i in range(w.l):
            ids = w.states[clean, i]

            def inner(z, reverse=reverse, i=i):
                return (reverse * kl(target=f[:, i].log(), student=z.log_softmax(-1).expand(len(f), -1))).sum()

            def edge(z, posterior=posterior, ids=ids):
                return (posterior * kl(target=ids, student=z.log_softmax(-1).expand(len(ids), -1))).sum()

            start = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
            truth = apply(w.reverse(s, t), f)[x, i]
            torch.testing.assert_close(minimise(inner, start).softmax(-1), truth, rtol=0, atol=1e-8)
            if not w.known[x, i]:
                truth = w.bayes(t)[x, i]
                torch.testing.assert_close(minimise(edge, start).softmax(-1), truth, rtol=0, atol=1e-8)


@pytest.mark.parametrize("kind", ["masked", "uniform", "unigram"])
def test_anchored_minimiser_is_unique(kind):
    """Eq. (5) + .3 anchor under forward KL, all times at once: random starts end at f*."""
    population = Population(world(kind))

    def loss(z):
        f = population.predictor(z)
        return population.consistency(f) + 0.3 * population.anchor(f)

    for seed in range(2):
        start = population.random(seed)
        assert tv(population.predictor(start), population.bayes).max() > 0.3
        f = population.predictor(minimise(loss, start))
        torch.testing.assert_close(f, population.bayes, rtol=0, atol=1e-6)


@pytest.mark.parametrize("kind", ["masked", "uniform"])
def test_stopped_gradients_reach_the_same_point(kind):
    """The training rule, Eq. (6) with targets held fixed plus the anchor, descends to f* from random starts."""
    w, grid = world(kind), (0.4, 0.6, 0.8)
    truth = torch.stack([w.bayes(t) for t in grid])
    x_s, x_t, i = (~w.known).expand(len(w.states), *w.states.shape).nonzero().T
    sure = w.known[x_s, i]
    token = w.states[x_s, i].clamp(max=VOCAB - 1)
    clean = (w.states < VOCAB).all(1)[x_s]
    posterior = [w.reverse(0, t)[x_t, x_s][clean] for t in grid]
    hops = {(a, b): w.reverse(grid[a], grid[b])[x_t, x_s] for b in range(3) for a in range(b)}

    def loss(z, frozen):
        total = z.new_zeros(())
        for b in range(3):
            student = z[b].log_softmax(-1)[x_t, i]
            total = total + 0.5 * (posterior[b] * kl(target=token[clean], student=student[clean])).sum()
            for a in range(b):
                point = kl(target=token[sure], student=student[sure])
                dense = kl(target=frozen[a][x_s, i][~sure].log(), student=student[~sure])
                total = total + 0.5 / b * ((hops[a, b][sure] * point).sum() + (hops[a, b][~sure] * dense).sum())
        return total

    for seed in range(2):
        generator = torch.Generator().manual_seed(seed)
        z = torch.randn(3, *w.states.shape, VOCAB, generator=generator, dtype=torch.float64).requires_grad_()
        for _ in range(150):
            frozen = torch.where(w.known[..., None], w.tokens, z.detach().softmax(-1))
            (gradient,) = torch.autograd.grad(loss(z, frozen), z)
            z = (z - 4.0 * gradient).detach().requires_grad_()
        f = torch.where(w.known[..., None], w.tokens, z.detach().softmax(-1))
        torch.testing.assert_close(f, truth, rtol=0, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_constants_satisfy_the_unanchored_equations(kind):
    """Constant in x and t, without carry-over: f = C f for 0 < s < t; the anchor tells it from f*."""
    w = world(kind)
    constant = torch.tensor([0.6, 0.3, 0.1], dtype=torch.float64).expand(*w.states.shape, VOCAB)
    for i, j in EDGES:
        image = apply(bridged(w, GRID[i], GRID[j]), constant)
        torch.testing.assert_close(image, constant, rtol=0, atol=1e-10)
    population = Population(w)
    everywhere = constant.expand(len(GRID), -1, -1, -1)
    assert tv(everywhere, population.bayes).max() > 0.3
    assert abs(float(population.consistency(everywhere))) < 1e-9
    assert population.anchor(everywhere) > population.anchor(population.bayes) + 0.1


def test_constant_in_time_alone_is_not_enough():
    """A predictor that depends on x but not on t is no fixed point on the uniform process."""
    w = world("uniform")
    g = predictor(w, 5)
    assert tv(apply(w.reverse(0.25, 0.75), g), g).max() > 0.1


@pytest.mark.parametrize("kind", ["uniform", "unigram"])
def test_without_anchor_the_loss_vanishes_elsewhere(kind):
    """Eq. (5) alone goes to zero from a random start, and the solution is not f*."""
    population = Population(world(kind))
    start = population.random(0)
    assert population.consistency(population.predictor(start)) > 0.1
    f = population.predictor(minimise(lambda z: population.consistency(population.predictor(z)), start))
    assert population.consistency(f) < 1e-8
    assert tv(f, population.bayes).max() > 0.1


@pytest.mark.parametrize(("s", "t"), [(0.25, 0.5), (0.1, 1.0), (0.7, 0.8)])
def test_carry_over_identifies_a_predictor_without_time(s, t):
    """Masked, unanchored: for f(x) with carry-over, f = C f is a regular linear system and f* its only solution."""
    w = world("masked")
    reverse = w.reverse(s, t)
    for i in range(w.l):
        hidden = ~w.known[:, i]
        unknown, given = reverse[hidden][:, hidden], reverse[hidden][:, ~hidden]
        system = torch.eye(len(unknown), dtype=torch.float64) - unknown
        assert torch.linalg.eigvals(unknown).abs().max() < 1 - 1e-2
        assert torch.linalg.svdvals(system).min() > 1e-2
        solution = torch.linalg.solve(system, given @ w.tokens[~hidden, i])
        for time in (t, 0.05, 1.0):
            torch.testing.assert_close(solution, w.bayes(time)[hidden, i], rtol=0, atol=1e-9)


def test_carry_over_iteration():
    """Masked, unanchored: f <- C f with carry-over ends at f* from every start; without carry-over it does not."""
    w = world("masked")
    reverse = bridged(w, 0.25, 0.75)
    for seed in range(3):
        f, free = predictor(w, seed, carry=True), predictor(w, seed)
        for _ in range(120):
            f = torch.where(w.known[..., None], w.tokens, apply(reverse, f))
            free = apply(reverse, free)
        torch.testing.assert_close(f, w.bayes(0.5), rtol=0, atol=1e-9)
        assert tv(free, w.bayes(0.5))[~w.known].max() > 0.02


def test_carry_over_identifies_in_the_limit():
    """Masked, f(x, t): whatever f is at s, C_{s<-t} f is within P(still masked) = (1 - a_s)/(1 - a_t) of f*.

    On a grid that stays away from 0 the earliest time remains free; as s -> 0 only f* is left. On the uniform process
    the distance does not shrink.
    """
    w, u, t = world("masked"), world("uniform"), 0.8
    for seed in range(3):
        wrong, other = predictor(w, seed, carry=True), predictor(u, seed)
        gaps, free = [], []
        for s in (0.4, 0.2, 0.1, 0.05, 0.025):
            gap = tv(apply(bridged(w, s, t), wrong), w.bayes(t))[~w.known].max()
            left = (1 - w.alpha(s)) / (1 - w.alpha(t))
            assert 0.01 * left < gap <= left
            gaps.append(float(gap))
            free.append(float(tv(apply(bridged(u, s, t), other), u.bayes(t)).max()))
        assert gaps[-1] / gaps[-2] == pytest.approx(0.5, abs=0.05)
        assert free[-1] > 0.9 * free[0] > 0.05


def sharpened(p: torch.Tensor, kappa: float) -> torch.Tensor:
    """argmin_q E_{y ~ p}[(1 - kappa) JSD(y, q) + kappa CE(y, q)]."""
    ids = torch.arange(len(p))

    def loss(z):
        q = z.log_softmax(-1).expand(len(p), -1)
        return (p * ((1 - kappa) * jsd(target=ids, student=q) + kappa * kl(target=ids, student=q))).sum()

    return minimise(loss, torch.zeros_like(p)).softmax(-1)


def test_jsd_sharpens():
    """The minimiser of E[JSD(x_0, q)] is not the law of x_0 but a sharper one: 28% of the entropy is lost.

    It solves p_y log(1 + 1/q_y) = lambda. With a share of .4 of cross entropy a tenth of the loss remains.
    """
    p = torch.tensor([0.45, 0.3, 0.15, 0.1], dtype=torch.float64)
    low, high = torch.zeros(()).double(), torch.ones(()).double() * 10
    for _ in range(200):
        level = (low + high) / 2
        low, high = (level, high) if torch.special.expm1(level / p).reciprocal().sum() > 1 else (low, level)
    torch.testing.assert_close(sharpened(p, 0.0), torch.special.expm1(low / p).reciprocal(), rtol=0, atol=1e-6)

    drop = {kappa: float(entropy(p) - entropy(sharpened(p, kappa))) for kappa in (0.0, 0.4, 1.0)}
    assert 0.34 < drop[0.0] < 0.36
    assert 0.27 < drop[0.0] / float(entropy(p)) < 0.29
    assert 0.03 < drop[0.4] < 0.04
    assert abs(drop[1.0]) < 1e-6


@pytest.mark.parametrize("kind", ["masked", "uniform"])
def test_jsd_of_drawn_targets_moves_off_the_fixed_point(kind):
    """Eq. (5) with JSD vanishes at f*; Eq. (6), where x_s is drawn, has its minimum elsewhere, and sharper."""
    w, s, t = world(kind), 0.3, 0.8
    x = len(w.states) - 1
    reverse, f_s, f_t = w.reverse(s, t)[x], w.bayes(s)[:, 0], w.bayes(t)[x, 0]
    mean = (reverse @ f_s)[None].log()
    assert float(jsd(target=mean, student=f_t[None].log())) == pytest.approx(0, abs=1e-12)

    def drawn(z):
        q, sure = z.log_softmax(-1), w.known[:, 0]
        points = jsd(target=w.states[sure, 0], student=q.expand(int(sure.sum()), -1))
        laws = jsd(target=f_s[~sure].log(), student=q.expand(int((~sure).sum()), -1))
        return (reverse[sure] * points).sum() + (reverse[~sure] * laws).sum()

    q = minimise(drawn, torch.zeros(VOCAB, dtype=torch.float64)).softmax(-1)
    drop = float(entropy(f_t) - entropy(q))
    assert tv(q, f_t) > 0.03
    assert (0.09 if kind == "masked" else 0.03) < drop < (0.12 if kind == "masked" else 0.06)
