"""Head and divergence in one pass, against the same by its definition and autograd, in double precision."""

import dataclasses

import pytest
import torch

from cdlm.methods import METHODS
from cdlm.model.config import SIZES
from cdlm.model.denoiser import Denoiser
from cdlm.model.ema import frozen_copy
from cdlm.objective import fused
from cdlm.objective.coupling import Bridge
from cdlm.objective.divergence import DIVERGENCES, ClosedForm, Inputs, divergence, kl
from cdlm.objective.fused import Summands, weighted_sums
from cdlm.objective.loss import Objective, Term, weighted_divergence
from cdlm.objective.target import Data, Network
from cdlm.objective.times import Times
from cdlm.objective.weight import inverse_step
from cdlm.process import masked, uniform, unigram
from cdlm.rng import seeded
from cdlm.schedules import constant

V, L, B = 7, 12, 5
LAW = torch.tensor([0.3, 0.0, 0.2, 0.1, 0.2, 0.1, 0.1], dtype=torch.float64)
PROCESSES = {
    "masked": masked(V),
    "uniform": uniform(V),
    "unigram": unigram(LAW + 0.05),
    "mask-and-unigram": unigram(torch.cat([LAW + 0.05, torch.tensor([0.4])]), V),
}
EVERY = {**DIVERGENCES, "reverse_kl, floor": divergence("reverse_kl", -3.0)}


def nets(process, seed: int = 0, position_embeddings: int = 0):
    torch.manual_seed(seed)
    shape = dataclasses.replace(
        SIZES["tiny"],
        hidden_size=16,
        num_layers=1,
        cond_dim=8,
        time_conditioning=True,
        position_embeddings=position_embeddings,
    )
    student = Denoiser(shape, process).double()
    for parameter in student.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    target = frozen_copy(student)
    for parameter in target.parameters():
        parameter += 0.2 * torch.randn_like(parameter)
    return student, target


def parts_of(process, divergence, target, kind):
    """Rows of M(x_t) of a few sequences, with weights of their own."""
    t = torch.linspace(0.2, 0.95, B, dtype=torch.float64)
    rng = seeded(3, batch=B)
    pair = Bridge(process)(rng("x").integers(L, V), t / 2, t, rng)
    groups = Data()(pair) if kind == "point" else Network()(pair, target)[1:]
    parts = []
    for index, goal in groups:
        weight = rng("weight").uniform(L).flatten()[index]
        parts.append(Summands(index, goal, weight, divergence, pair.at(index)))
    return pair, parts


def plain(student, hidden, part):
    return weighted_divergence(part, student, hidden).sum()


def gradients(value, student, hidden):
    return torch.autograd.grad(value, [hidden, *student.backbone.output_layer.linear.parameters()])


@pytest.mark.parametrize("kind", ["point", "law"])
@pytest.mark.parametrize("name", list(EVERY))
@pytest.mark.parametrize("process", list(PROCESSES.values()), ids=list(PROCESSES))
@pytest.mark.parametrize("chunk", [512, 7])
def test_value_and_gradients_are_those_of_autograd(process, name, kind, chunk, monkeypatch) -> None:
    monkeypatch.setattr(fused, "CPU_CHUNK", chunk)  # also where rows are left over
    student, target = nets(process)
    pair, parts = parts_of(process, EVERY[name], target, kind)
    hidden = student.features(pair.x_t, pair.alpha_t).flatten(0, 1).detach().requires_grad_()
    total, sums = weighted_sums(student, hidden, parts)
    truth = sum(plain(student, hidden, part) for part in parts)
    torch.testing.assert_close(total, truth, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(torch.stack(sums).sum(), truth.detach(), rtol=1e-10, atol=1e-12)
    for found, wanted in zip(gradients(3 * total, student, hidden), gradients(3 * truth, student, hidden), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-8, atol=1e-11)


@pytest.mark.parametrize("name", ["kl", "reverse_kl", "jsd", "rate_kl"])
@pytest.mark.parametrize("kind", ["point", "law"])
def test_gradcheck(name, kind) -> None:
    """Against finite differences, in all three inputs."""
    process = uniform(V)
    student, target = nets(process)
    pair, parts = parts_of(process, DIVERGENCES[name], target, kind)
    hidden = student.features(pair.x_t, pair.alpha_t).flatten(0, 1).detach().requires_grad_()
    head = student.backbone.output_layer.linear
    work = [fused._prepared(part, head.weight) for part in parts]

    def total(h, w, b):
        return fused._Total.apply(h, w, b, work, torch.float64, True)[0]

    assert torch.autograd.gradcheck(total, (hidden, head.weight, head.bias), fast_mode=True)


def test_padded_heads_give_the_same(monkeypatch) -> None:
    """Tokens without probability fill the vocabulary up, as on a GPU."""
    process = masked(V)
    student, target = nets(process)
    for kind in ("point", "law"):
        pair, parts = parts_of(process, DIVERGENCES["jsd"], target, kind)
        hidden = student.features(pair.x_t, pair.alpha_t).flatten(0, 1).detach().requires_grad_()
        truth, _ = weighted_sums(student, hidden, parts)
        real = fused._padded

        def padded(weight, bias, dtype, real=real):
            weight, bias = real(weight, bias, dtype)
            extra = torch.nn.functional.pad
            return extra(weight, (0, 0, 0, 5)), extra(bias, (0, 5), value=fused._NEVER)

        monkeypatch.setattr(fused, "_padded", padded)
        found, _ = weighted_sums(student, hidden, parts)
        for a, b in zip(gradients(found, student, hidden), gradients(truth, student, hidden), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)
        monkeypatch.setattr(fused, "_padded", real)


def squares(*, target, student, pair=None):
    """The sum of (P - Q)^2: a divergence from outside the package, as a plain function."""
    goal = target.exp() if target.is_floating_point() else torch.nn.functional.one_hot(target, V).double()
    return (goal - student.exp()).square().sum(-1)


def squares_point(log_q, y, w):
    return squares_dense(log_q, torch.nn.functional.one_hot(y, V).to(log_q).log(), w)


def squares_dense(log_q, log_p, w):
    q, difference = log_q.exp(), log_q.exp() - log_p.exp()
    slope = 2 * q * (difference - (q * difference).sum(-1, keepdim=True))
    return w * difference.square().sum(-1), w[:, None] * slope


CLOSED = {
    "none": squares,
    "point": ClosedForm("squares", squares, point=squares_point),
    "both": ClosedForm("squares", squares, squares_point, squares_dense),
}


@pytest.mark.parametrize("kind", list(CLOSED))
def test_a_divergence_from_outside_with_and_without_closed_forms(kind) -> None:
    """The loss and gradient of an objective are those of the definition, and closed forms are used where given."""
    process, calls = masked(V), []
    student, target = nets(process)
    times = Times(constant(0.3), constant(0.6))
    found = CLOSED[kind]
    if isinstance(found, ClosedForm):

        def counted(gradient):
            return gradient and (lambda *inputs: calls.append(gradient) or gradient(*inputs))

        found = dataclasses.replace(found, point=counted(found.point), dense=counted(found.dense))
    objective = Objective((Term("squares", times, Bridge(process), Network(), found, inverse_step),), 10)
    x0, results = seeded(0, "x", batch=B).integers(L, V), []
    for plain_form in (False, True):
        student.zero_grad()
        loss = objective.loss(student, target, x0, 0, seeded(1, batch=B), plain=plain_form)
        loss.total.backward()
        assert not loss.terms["squares"].requires_grad
        gradient = torch.cat([parameter.grad.flatten() for parameter in student.parameters()])
        results.append((loss.total.detach(), loss.terms["squares"], gradient))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)
    assert float(results[0][2].norm()) > 0
    given = {"none": set(), "point": {squares_point}, "both": {squares_point, squares_dense}}
    assert set(calls) == given[kind]


def test_a_closed_form_may_read_the_pair() -> None:
    """The KL times the time of each row and a shared factor, as inputs of its gradient."""

    def scaled(*, target, student, pair):
        return 3 * pair.t.to(student.dtype) * kl(target=target, student=student)

    def inputs(pair):
        return Inputs((pair.t,), (torch.tensor([3.0], dtype=torch.float64),))

    def point(log_q, y, w, t, factor):
        assert t.shape == w.shape
        return kl.point(log_q, y, w * t * factor)

    process = masked(V)
    student, target = nets(process)
    timed = ClosedForm("timed kl", scaled, point, inputs=inputs)
    pair, parts = parts_of(process, timed, target, "point")
    hidden = student.features(pair.x_t, pair.alpha_t).flatten(0, 1).detach().requires_grad_()
    total, _ = weighted_sums(student, hidden, parts)
    truth = sum(plain(student, hidden, part) for part in parts)
    torch.testing.assert_close(total, truth)
    for found, wanted in zip(gradients(total, student, hidden), gradients(truth, student, hidden), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-8, atol=1e-11)


def test_every_built_in_divergence_is_closed_for_both_kinds_of_target() -> None:
    for found in EVERY.values():
        assert found.point is not None
        assert found.dense is not None


def test_nothing_to_learn_has_no_gradient_at_all() -> None:
    """A student that is its teacher, at the same input: exactly zero, where autograd leaves rounding."""
    process = masked(V)
    student, _ = nets(process)
    pair, parts = parts_of(process, DIVERGENCES["reverse_kl"], frozen_copy(student), "law")
    hidden = student.features(pair.x_s, pair.alpha_s).flatten(0, 1).detach().requires_grad_()
    for gradient in gradients(weighted_sums(student, hidden, parts)[0], student, hidden):
        assert float(gradient.abs().max()) == 0


@pytest.mark.parametrize("name", list(METHODS))
def test_training_takes_the_same_course(name: str) -> None:
    """Ten steps of every method, fused and plain, in double precision: the same losses to ten digits."""

    def course(plain: bool) -> list[float]:
        method = METHODS[name]
        process = method.default_process(V)
        torch.manual_seed(0)
        causal = method.process == "none"
        changes = {
            "hidden_size": 16,
            "num_layers": 1,
            "cond_dim": 8,
            "causal": causal,
            "time_conditioning": method.time_conditioning,
            "joint_layers": int(method.joint_head),
        }
        student = Denoiser(dataclasses.replace(SIZES["tiny"], **changes), process, vocab=V).double()
        for parameter in student.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
        objective = method(process, 20)
        target = frozen_copy(student) if objective.network else None
        for parameter in student.parameters():
            parameter.data += 0.05 * torch.randn_like(parameter)
        optimizer, losses = torch.optim.AdamW(student.parameters(), lr=1e-2), []
        for step in range(10):
            x0 = seeded(step, "x", batch=6).integers(L, V)
            loss = objective.loss(student, target, x0, step, seeded(step, batch=6), plain=plain).total
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    # relaxed inputs are mixtures in single precision
    assert course(plain=False) == pytest.approx(course(plain=True), rel=1e-6 if name == "duo" else 1e-9)


@pytest.mark.parametrize("positions", [0, L], ids=["rotary", "learned"])
@pytest.mark.parametrize("name", ["kl", "jsd", "reverse_kl"])
def test_a_guided_and_sharpened_target(name, positions):
    """The fused gradient follows the law that the target says it has, and that law is f^((1 + g) / T) / b^(g / T); b is
    the mean law of a blank text over all its positions, which a network with learned ones can tell apart."""
    process, how = masked(V), Network(temperature=0.6, guidance=0.7)
    student, target = nets(process, position_embeddings=positions)
    t = torch.linspace(0.5, 0.95, B, dtype=torch.float64)
    pair = Bridge(process)(seeded(3, batch=B).integers(L, V), t / 2, t, seeded(3, batch=B))
    (_, (index, goal)) = how(pair, target)
    with torch.no_grad():
        laws = target.head(target.features(torch.full((1, L), V), process.noise.alpha(torch.ones(1).double())))[0]
        blank = laws.exp().mean(0).log()
        assert torch.allclose(laws, blank.expand_as(laws)) == (not positions)
        f = target.head(target.features(pair.x_s, pair.alpha_s)).flatten(0, 1)[index]
    power = (f.exp() ** 1.7 / blank.exp() ** 0.7) ** (1 / 0.6)
    assert torch.allclose(goal.log_probs().exp(), power / power.sum(-1, keepdim=True))
    part = Summands(index, goal, torch.ones(len(index)).double(), DIVERGENCES[name], pair.at(index))
    found = []
    for way in (lambda h: weighted_sums(student, h, [part])[0], lambda h: plain(student, h, part)):
        hidden = student.features(pair.x_t, pair.alpha_t).flatten(0, 1).detach().requires_grad_()
        value = way(hidden)
        found.append((value.detach(), *gradients(value, student, hidden)))
    for one, other in zip(*found, strict=True):
        assert torch.allclose(one, other, atol=1e-9)
