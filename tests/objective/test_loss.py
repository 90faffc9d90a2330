"""Objective.loss against Eq. (8) written out: dense laws, one position and one token at a time.

The table below is the paper's, typed in by hand; of the objective under test only the draws are used.
"""

import dataclasses
import math

import pytest
import torch
from torch import Tensor

from cdlm.methods import METHODS
from cdlm.model.denoiser import Denoiser
from cdlm.model.ema import frozen_copy
from cdlm.model.joint import plain_conditioned
from cdlm.objective import Objective, Term
from cdlm.process import masked, uniform, unigram
from cdlm.rng import seeded
from cdlm.schedules import constant
from cdlm.types import Mixture, Pair

V, B, L, TOTAL = 6, 8, 5, 1000
PROCESSES = {"masked": masked(V), "any mask": masked(V), "uniform": uniform(V), "none": None}


def kappa(progress: float) -> float:
    return 0.4 if progress <= 2 / 3 else 0.4 - 0.2 * (progress - 2 / 3) * 3


# name of the term -> share at a progress, target, divergence, weight(s, t)
DATA_RATE = (lambda p: 1.0, "data", "rate_kl", lambda s, t: 1.0)
DISTIL = (lambda p: 1.0, "network", "reverse_kl", lambda s, t: 1.0)
CONSISTENCY = (lambda p: 0.6, "network", "jsd", lambda s, t: 1 / (t - s))
ANCHOR = (lambda p: 0.4, "data", "kl", lambda s, t: 1 / t)
TABLE = {
    "ar": {"next token": (lambda p: 1.0, "data", "kl", lambda s, t: 1.0)},
    "mdlm": {"nelbo": DATA_RATE},
    "udlm": {"nelbo": DATA_RATE},
    "duo": {
        "curriculum": (lambda p: float(p < 0.5), *DATA_RATE[1:]),
        "nelbo": (lambda p: float(p >= 0.5), *DATA_RATE[1:]),
    },
    "mcdlm": {"consistency": CONSISTENCY, "anchor": ANCHOR},
    "ucdlm": {"consistency": CONSISTENCY, "anchor": ANCHOR},
    "mcdlm-guided": {"consistency": (*CONSISTENCY[:2], "kl", CONSISTENCY[3]), "anchor": ANCHOR},
    "mcdlm-pplopt": {
        "consistency": (lambda p: 1 - kappa(p), *CONSISTENCY[1:]),
        "anchor": (kappa, *ANCHOR[1:]),
    },
    "few-step": {"hop": (lambda p: 1.0, "revealed", "kl", lambda s, t: 8.0)},
    "joint": {
        **{f"{n} steps": (lambda p: 0.5 / 6, "revealed", "kl", lambda s, t, n=n: n) for n in (1, 2, 4, 8, 16, 32)},
        **{f"{n} steps, dilated": (lambda p: 0.1, "revealed", "kl", lambda s, t, n=n: n) for n in (2, 4, 8, 16, 32)},
    },
    "sdtt": {"distillation": DISTIL},
    "duo-dcd": {"distillation": DISTIL},
}
every_method = pytest.mark.parametrize("name", METHODS)
GAMMAS = {"curriculum": (-3.55, -1.85), "distillation": (-4.0, -1.0)}


@dataclasses.dataclass(eq=False)
class Recorder:
    """A coupling that remembers its draws."""

    inner: object
    pairs: list[Pair]

    def __call__(self, x0, s, t, rng, teacher=None):
        pair = self.inner(x0, s, t, rng, teacher)
        self.pairs.append(pair)
        return pair


def recorded(objective: Objective) -> tuple[Objective, dict[str, list[Pair]]]:
    seen: dict[str, list[Pair]] = {}
    terms = []
    for term in objective.terms:
        # `Term` checks its types in tests; a recorder stands in after construction.
        copy = dataclasses.replace(term)
        object.__setattr__(copy, "coupling", Recorder(term.coupling, seen.setdefault(term.name, [])))
        terms.append(copy)
    return Objective(tuple(terms), objective.total), seen


def value(x: Tensor) -> float:
    return x.detach().item()


def setting(name: str, tiny) -> tuple[Denoiser, Denoiser, Tensor]:
    process = PROCESSES[METHODS[name].process]
    method = METHODS[name]
    build = {"causal": process is None, "time": method.time_conditioning, "joint": method.joint_head}
    student, target = tiny(process, seed=1, **build), tiny(process, seed=2, **build)
    return student, target, torch.randint(V, (B, L), generator=torch.Generator().manual_seed(3))


# ---------------------------------------------------------------------------------------------- Eq. (8), written out


def win_probability(gamma: float) -> float:
    """The clean coordinate of V Gaussians wins: a plain Riemann sum."""
    m, step = math.exp(-gamma / 2), 2e-3
    y = torch.arange(m - 10, m + 10, step, dtype=torch.float64)
    density = torch.exp(-((y - m) ** 2) / 2) / math.sqrt(2 * math.pi)
    return float((density * torch.special.ndtr(y) ** (V - 1)).sum() * step)


def signal(term: str, method: str, time: float) -> tuple[float, float]:
    """alpha and its derivative at a time: log-linear, or that of DUO's Gaussian by differences."""
    if method in ("duo", "duo-dcd") and term in GAMMAS:
        low, high = GAMMAS[term]

        def alpha(t: float) -> float:
            return (V * win_probability(low + (high - low) * t) - 1) / (V - 1)

        return alpha(time), (alpha(time + 1e-4) - alpha(time - 1e-4)) / 2e-4
    return 1 - 0.999 * time, -0.999


class Given(torch.nn.Module):
    """Stands in for the embedding."""

    def __init__(self, value: Tensor) -> None:
        super().__init__()
        self.value = value

    def forward(self, x: Tensor) -> Tensor:
        return self.value


def guided(law: list[float], blank: list[float], guidance: float = 1.0, temperature: float = 0.85) -> list[float]:
    """f^(1 + g) / b^g at a temperature, normalised."""
    weights = [(f ** (1 + guidance) / b**guidance) ** (1 / temperature) for f, b in zip(law, blank, strict=True)]
    return [weight / sum(weights) for weight in weights]


def law_at(net: Denoiser, x: Tensor | Mixture, alpha: float) -> list[list[float]]:
    """The network's law at each position of one sequence; mixtures as dense weights times the embedding matrix."""
    level = torch.tensor([-math.log(alpha) if net.config.time_conditioning else 0.0])
    backbone = net.backbone
    with torch.no_grad():
        if isinstance(x, Mixture):
            dense = torch.zeros(1, L, V, dtype=torch.float64) + x.rest[..., None].double() / V
            for i in range(L):
                for token, weight in zip(x.ids[0, i].tolist(), x.weights[0, i].tolist(), strict=True):
                    dense[0, i, token] += weight
            embedding = backbone.vocab_embed
            backbone.vocab_embed = Given(dense @ embedding.embedding)
            hidden = backbone(torch.zeros(1, L, dtype=torch.long), level)
            backbone.vocab_embed = embedding
        else:
            hidden = backbone(x[None], level)
        return backbone.output_layer.linear(hidden)[0].softmax(-1).tolist()


def joint_law_at(net: Denoiser, x_t: Tensor, x_s: Tensor, alpha: float) -> list[list[float]]:
    """The same given the tokens to the left that x_s shows and x_t does not, one position at a time."""
    with torch.no_grad():
        hidden = net.features(x_t[None], torch.tensor([alpha]))
        revealed = (x_t[None] == V) & (x_s[None] < V)
        rows = plain_conditioned(net.joint_head, net.backbone.vocab_embed, hidden, x_s[None], revealed)
        return net.backbone.output_layer.linear(rows)[0].softmax(-1).tolist()


def divergence(name: str, p: list[float], q: list[float], prior: list[float], z: int, a: float, da: float) -> float:
    def term(x: float, y: float) -> float:
        return x * math.log(x / y) if x > 0 else 0.0

    if name == "kl":
        return sum(term(x, y) for x, y in zip(p, q, strict=True))
    if name == "reverse_kl":
        return sum(term(y, x if max(p) < 1 else max(x, 1e-6)) for x, y in zip(p, q, strict=True))
    if name == "jsd":
        return sum(term(x, (x + y) / 2) + term(y, (x + y) / 2) for x, y in zip(p, q, strict=True)) / 2
    extra = [0.0] * (len(prior) - V)
    m_p, m_q = ([a * x + (1 - a) * w for x, w in zip(law + extra, prior, strict=True)] for law in (p, q))
    total = 0.0
    for y in range(len(prior)):
        if y != z:
            r_p, r_q = (-da / a * prior[z] * m[y] / m[z] for m in (m_p, m_q))
            total += term(r_p, r_q) - r_p + r_q
    return total


def equation_8(method: str, shares: dict[str, float], seen: dict[str, list[Pair]], student: Denoiser, target: Denoiser):
    process = PROCESSES[METHODS[method].process]
    prior = [] if process is None else process.prior.tolist()
    total, tokens, means = 0.0, 0, {}
    for name, (_, kind, found, weight) in TABLE[method].items():
        for pair in seen.get(name, []):
            sums = 0.0
            for row in range(len(pair.x0)):
                s, t = float(pair.s[row]), float(pair.t[row])
                alpha_t, dalpha = signal(name, method, t)
                alpha_s = signal(name, method, s)[0]
                x0, x_s, x_t = (x[row].tolist() for x in (pair.x0, pair.x_s, pair.x_t))
                shown = pair.x_t[row]
                if isinstance(pair.input, Mixture):
                    shown = Mixture(*(getattr(pair.input, f)[row : row + 1] for f in ("ids", "weights", "rest")))
                elif pair.input is not None:
                    shown = pair.input[row]
                f = law_at(student, shown, 1.0 if process is None else alpha_t)
                if method == "joint":
                    f = joint_law_at(student, pair.x_t[row], pair.x_s[row], alpha_t)
                early = law_at(target, pair.x_t[row], alpha_t) if method == "sdtt" else []
                late = law_at(target, pair.x_s[row], alpha_s) if kind == "network" else []
                if method == "mcdlm-guided" and kind == "network":
                    blank = law_at(target, torch.full_like(pair.x_s[row], V), alpha_s)[0]
                    late = [guided(f_s, blank) for f_s in late]
                for i in range(len(x0)):
                    if prior and prior[x_t[i]] == 0:
                        continue  # not in M(x_t)
                    if kind == "revealed" and x_s[i] >= V:
                        continue  # drawn in a later hop
                    if kind in ("data", "revealed"):
                        p = [float(y == x0[i]) for y in range(V)]
                    elif method == "sdtt" and x_s[i] < V:
                        p = early[i]
                    elif prior[x_s[i]] == 0 or (s == 0 and method != "duo-dcd"):
                        p = [float(y == x_s[i]) for y in range(V)]
                    else:
                        p = late[i]
                    sums += weight(s, t) * divergence(found, p, f[i], prior, x_t[i], alpha_t, dalpha)
            tokens += pair.x0.numel()
            total += sums
            means[name] = sums / pair.x0.numel()
    return sum(shares.values()) * total / tokens, means


CASES = [(name, step) for name in METHODS for step in (100, 900)]


@pytest.mark.parametrize(("name", "step"), CASES)
def test_loss_is_equation_8_written_out(name, step, tiny):
    student, target, x0 = setting(name, tiny)
    objective, seen = recorded(METHODS[name](PROCESSES[METHODS[name].process], TOTAL))
    loss = objective.loss(student, target, x0, step, seeded(step, "step", batch=B))
    shares = {term: row[0](step / TOTAL) for term, row in TABLE[name].items()}
    truth, means = equation_8(name, shares, seen, student, target)
    assert sum(len(pair.x0) for pairs in seen.values() for pair in pairs) == B
    tolerance = 1e-6 if name in ("duo", "duo-dcd") else 1e-9  # differences in the truth, single precision in mixtures
    assert value(loss.total) == pytest.approx(truth, rel=tolerance)
    assert {key: value(mean) for key, mean in loss.terms.items()} == pytest.approx(means, rel=tolerance)
    drawn = {term for term, share in shares.items() if share > 0}
    assert set(means) <= drawn
    assert len(means) == min(len(drawn), B)


@pytest.mark.parametrize(
    ("found", "anchor"), [("kl", "jsd"), ("reverse_kl", "rate_kl"), ("tv", "kl")], ids=["kl", "reverse_kl", "tv"]
)
def test_ablations_are_equation_8_written_out(found, anchor, tiny, monkeypatch):
    student, target, x0 = setting("ucdlm", tiny)
    objective, seen = recorded(
        METHODS["ucdlm"](uniform(V), TOTAL, divergence=found, anchor=anchor, additive=True, kappa=1.5)
    )
    loss = objective.loss(student, target, x0, 500, seeded(5, batch=B))
    written = {"tv": "jsd"}.get(found, found)
    table = {"consistency": (None, "network", written, CONSISTENCY[3]), "anchor": (None, "data", anchor, ANCHOR[3])}
    if anchor == "rate_kl":
        table["anchor"] = (None, "data", anchor, lambda s, t: 1.0)
    monkeypatch.setitem(TABLE, "ucdlm", table)
    if found == "tv":
        plain = divergence

        def half_absolute(name, p, q, *rest):
            if name == "jsd":
                return sum(abs(x - y) for x, y in zip(p, q, strict=True)) / 2
            return plain(name, p, q, *rest)

        monkeypatch.setitem(globals(), "divergence", half_absolute)
    truth, means = equation_8("ucdlm", {"consistency": 1.0, "anchor": 1.5}, seen, student, target)
    assert len(means) == 2
    assert value(loss.total) == pytest.approx(truth, rel=1e-9)


def test_duo_mixes_relaxed_and_plain_rows_in_one_pass(tiny):
    student, target, x0 = setting("duo", tiny)
    objective = METHODS["duo"](uniform(V), TOTAL)
    halves = tuple(dataclasses.replace(term, share=constant(0.5)) for term in objective.terms)
    both, seen = recorded(Objective(halves, TOTAL))
    calls = []
    student.backbone.register_forward_hook(lambda module, args, out: calls.append(len(out)))
    loss = both.loss(student, target, x0, 1, seeded(0, batch=B))
    assert calls == [B]  # the student runs once
    assert {name: [len(pair.x0) for pair in pairs] for name, pairs in seen.items()} == {"curriculum": [4], "nelbo": [4]}
    truth, means = equation_8("duo", {"curriculum": 0.5, "nelbo": 0.5}, seen, student, target)
    assert value(loss.total) == pytest.approx(truth, rel=1e-6)
    assert {key: value(mean) for key, mean in loss.terms.items()} == pytest.approx(means, rel=1e-6)


@every_method
def test_half_batches_average_to_the_whole_batch(name, tiny):
    student, target, x0 = setting(name, tiny)
    objective = METHODS[name](PROCESSES[METHODS[name].process], TOTAL)
    for step in (100, 900):
        whole = objective.loss(student, target, x0, step, seeded(7, step, batch=B)).total
        for cut in (torch.arange(B).view(2, -1), torch.arange(B).view(-1, 2).T):
            parts = [
                objective.loss(student, target, x0[rows], step, seeded(7, step, batch=B, rows=rows)).total
                for rows in cut
            ]
            assert value(sum(parts) / 2) == pytest.approx(value(whole), rel=1e-12)


@pytest.mark.parametrize("name", ["mdlm", "mcdlm", "ucdlm", "sdtt"])
def test_times_are_stratified_over_ranks_and_micro_batches(name, tiny):
    """2 ranks with 2 micro-batches each: together, each term has exactly one t in each of its strata."""
    student, target, x0 = setting(name, tiny)
    objective, seen = recorded(METHODS[name](PROCESSES[METHODS[name].process], TOTAL))
    for rows in torch.arange(B).view(4, -1):
        objective.loss(student, target, x0[rows], 300, seeded(11, batch=B, rows=rows))
    count = 0
    for term in objective.terms:
        t = torch.cat([pair.t for pair in seen[term.name]]).sort().values
        u = (t - term.times.floor) / (1 - term.times.floor)
        assert (u * len(u)).floor().long().tolist() == list(range(len(u)))
        count += len(u)
    assert count == B


@every_method
def test_gradient_reaches_every_weight_of_the_student_and_none_of_the_target(name, tiny):
    student, target, x0 = setting(name, tiny)
    objective = METHODS[name](PROCESSES[METHODS[name].process], TOTAL)
    objective.loss(student, target, x0, 100, seeded(9, batch=B)).total.backward()
    silent = [key for key, weight in student.named_parameters() if weight.grad is None or not weight.grad.abs().sum()]
    assert silent == []
    assert all(weight.grad is None for weight in target.parameters())


@every_method
def test_gradient_is_the_slope_of_the_loss(name, tiny):
    """Along a random direction, by differences: so nothing that depends on the student is cut off."""
    student, target, x0 = setting(name, tiny)
    objective = METHODS[name](PROCESSES[METHODS[name].process], TOTAL)

    def loss() -> Tensor:
        return objective.loss(student, target, x0, 100, seeded(9, batch=B)).total

    loss().backward()
    weights = list(student.parameters())
    direction = [torch.randn_like(weight) for weight in weights]
    slope = sum(float((weight.grad * move).sum()) for weight, move in zip(weights, direction, strict=True))

    def moved(h: float) -> float:
        with torch.no_grad():
            torch._foreach_add_(weights, direction, alpha=h)
            found = value(loss())
            torch._foreach_add_(weights, direction, alpha=-h)
        return found

    h = 1e-5
    assert (moved(h) - moved(-h)) / (2 * h) == pytest.approx(slope, rel=1e-4, abs=1e-6)


def test_convex_shares_are_unbiased_for_equation_7(tiny):
    """Mean over seeds of the mixed loss = .6 of the consistency loss + .4 of the anchor, each run on every row."""
    student, target, x0 = setting("mcdlm", tiny)
    x0 = torch.randint(V, (3, 128))
    objective = METHODS["mcdlm"](masked(V), TOTAL)
    count = 60

    def losses(terms: tuple[Term, ...], first: int) -> Tensor:
        run, seeds = Objective(terms, TOTAL), range(first, first + count)
        with torch.no_grad():
            return torch.stack([run.loss(student, target, x0, 0, seeded(seed, batch=3)).total for seed in seeds])

    mixed = losses(objective.terms, 0)
    alone = [losses((dataclasses.replace(term, share=constant(1.0)),), count) for term in objective.terms]
    truth = 0.6 * alone[0].mean() + 0.4 * alone[1].mean()
    error = (mixed.var() + 0.36 * alone[0].var() + 0.16 * alone[1].var()).div(count).sqrt()
    assert abs(float(mixed.mean() - truth)) < 4.9 * float(error)
    assert abs(float(alone[0].mean() - alone[1].mean())) > 20 * float(error)  # so a wrong share would show


def test_the_anchor_alone_is_mdlm(tiny):
    """kappa = 1 under forward KL is the NELBO (Prop. D.1)."""
    student, target, x0 = setting("mcdlm", tiny)
    objective, seen = recorded(METHODS["mcdlm"](masked(V), TOTAL, kappa=1.0))
    loss = objective.loss(student, target, x0, 0, seeded(0, batch=B))
    assert set(loss.terms) == {"anchor"}
    truth, _ = equation_8("mcdlm", {"consistency": 0.0, "anchor": 1.0}, seen, student, target)
    assert value(loss.total) == pytest.approx(truth, rel=1e-9)


@pytest.mark.parametrize("name", ["mcdlm", "ucdlm"])
def test_other_priors_and_schedules_run_through_the_same_lines(name, tiny):
    process = (
        masked(V) if name == "mcdlm" else unigram(torch.arange(1.0, V + 2), vocab=V)
    )  # a mixture of mask and unigram takes the uniform rows
    student = tiny(process, time=True, seed=1)
    loss = METHODS[name](process, TOTAL).loss(
        student, frozen_copy(student), torch.randint(V, (B, L)), 500, seeded(0, batch=B)
    )
    assert math.isfinite(value(loss.total))
    assert set(loss.terms) == {"consistency", "anchor"}


def test_loss_is_in_nats_per_token_whatever_the_length(tiny):
    """A network that knows nothing pays -log(1/V) for each next token."""
    net = tiny(causal=True)
    torch.nn.init.zeros_(net.backbone.output_layer.linear.weight)
    torch.nn.init.zeros_(net.backbone.output_layer.linear.bias)
    objective = METHODS["ar"](None, TOTAL)
    for length in (2, 9):
        loss = objective.loss(net, None, torch.randint(V, (3, length)), 0, seeded(0, batch=3))
        assert value(loss.total) == pytest.approx(math.log(V), rel=1e-12)


def test_the_same_step_has_the_same_loss_and_another_step_another(tiny):
    student, target, x0 = setting("mcdlm", tiny)
    objective = METHODS["mcdlm"](masked(V), TOTAL)
    values = [value(objective.loss(student, target, x0, 5, seeded(0, step, batch=B)).total) for step in (1, 1, 2)]
    assert values[0] == values[1] != values[2]


@pytest.mark.parametrize("name", ["mcdlm", "mcdlm-pplopt", "ucdlm", "sdtt", "duo-dcd"])
def test_methods_with_a_target_network_say_that_they_need_one(name, tiny):
    student, _, x0 = setting(name, tiny)
    objective = METHODS[name](PROCESSES[METHODS[name].process], TOTAL)
    assert objective.network is not None
    with pytest.raises(ValueError, match="teacher"):
        objective.loss(student, None, x0, 0, seeded(0, batch=B))


@pytest.mark.parametrize("name", ["ar", "mdlm", "udlm", "duo"])
def test_methods_without_a_target_network_need_none(name, tiny):
    student, _, x0 = setting(name, tiny)
    objective = METHODS[name](PROCESSES[METHODS[name].process], TOTAL)
    assert objective.network is None
    assert math.isfinite(value(objective.loss(student, None, x0, 0, seeded(0, batch=B)).total))


@pytest.mark.parametrize("bad", [-1, V])
@pytest.mark.parametrize("name", ["mdlm", "udlm", "mcdlm", "ucdlm", "sdtt"])
def test_data_outside_the_vocabulary_is_refused(name, bad, tiny):
    student, target, x0 = setting(name, tiny)
    x0[0, 0] = bad
    objective = METHODS[name](PROCESSES[METHODS[name].process], TOTAL)
    with pytest.raises(ValueError, match=r"data ids lie in \[0, 6\)"):
        objective.loss(student, target, x0, 0, seeded(0, batch=B))
