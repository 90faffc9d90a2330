"""Head and divergence in one pass, against the same by its definition and autograd, in double precision."""

import dataclasses
import functools

import pytest
import torch

from cdlm.methods import METHODS
from cdlm.model.config import SIZES
from cdlm.model.denoiser import Denoiser
from cdlm.model.ema import frozen_copy
from cdlm.objective import fused
from cdlm.objective.coupling import Bridge
from cdlm.objective.divergence import DIVERGENCES, reverse_kl
from cdlm.objective.fused import Part, plain, weighted_sum
from cdlm.objective.target import Data, Network
from cdlm.process import masked, uniform, unigram
from cdlm.rng import seeded

V, L, B = 7, 12, 5
LAW = torch.tensor([0.3, 0.0, 0.2, 0.1, 0.2, 0.1, 0.1], dtype=torch.float64)
PROCESSES = {
    "masked": masked(V),
    "uniform": uniform(V),
    "unigram": unigram(LAW + 0.05),
    "mask-and-unigram": unigram(torch.cat([LAW + 0.05, torch.tensor([0.4])]), V),
}
EVERY = {**DIVERGENCES, "reverse_kl, floor": functools.partial(reverse_kl, floor=-3.0)}


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
        parts.append(Part(index, goal, weight, divergence, pair.at(index)))
    return pair, parts


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
    total, sums = weighted_sum(student, hidden, parts)
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
        truth, _ = weighted_sum(student, hidden, parts)
        real = fused._padded

        def padded(weight, bias, dtype, real=real):
            weight, bias = real(weight, bias, dtype)
            extra = torch.nn.functional.pad
            return extra(weight, (0, 0, 0, 5)), extra(bias, (0, 5), value=fused._NEVER)

        monkeypatch.setattr(fused, "_padded", padded)
        found, _ = weighted_sum(student, hidden, parts)
        for a, b in zip(gradients(found, student, hidden), gradients(truth, student, hidden), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)
        monkeypatch.setattr(fused, "_padded", real)


def test_a_divergence_of_ones_own_needs_no_closed_form() -> None:
    def squares(*, target, student, pair=None):
        goal = target.exp() if target.is_floating_point() else torch.nn.functional.one_hot(target, V).double()
        return (goal - student.exp()).square().sum(-1)

    process = masked(V)
    student, target = nets(process)
    pair, parts = parts_of(process, squares, target, "law")
    hidden = student.features(pair.x_t, pair.alpha_t).flatten(0, 1).detach().requires_grad_()
    total, (alone,) = weighted_sum(student, hidden, parts)
    torch.testing.assert_close(total, plain(student, hidden, parts[0]))
    assert not alone.requires_grad
    assert gradients(total, student, hidden)[0].abs().sum() > 0


def test_nothing_to_learn_has_no_gradient_at_all() -> None:
    """A student that is its teacher, at the same input: exactly zero, where autograd leaves rounding."""
    process = masked(V)
    student, _ = nets(process)
    pair, parts = parts_of(process, DIVERGENCES["reverse_kl"], frozen_copy(student), "law")
    hidden = student.features(pair.x_s, pair.alpha_s).flatten(0, 1).detach().requires_grad_()
    for gradient in gradients(weighted_sum(student, hidden, parts)[0], student, hidden):
        assert float(gradient.abs().max()) == 0


@pytest.mark.parametrize("name", list(METHODS))
def test_training_takes_the_same_course(name: str, monkeypatch) -> None:
    """Ten steps of every method, fused and plain, in double precision: the same losses to ten digits."""

    def course() -> list[float]:
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
            loss = objective.loss(student, target, x0, step, seeded(step, batch=6)).total
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    found = course()
    monkeypatch.setattr(fused, "_KERNELS", {})
    assert found == pytest.approx(course(), rel=1e-9)


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
    assert torch.allclose(goal.law().exp(), power / power.sum(-1, keepdim=True))
    part = Part(index, goal, torch.ones(len(index)).double(), DIVERGENCES[name], pair.at(index))
    found = []
    for way in (lambda h: weighted_sum(student, h, [part])[0], lambda h: plain(student, h, part)):
        hidden = student.features(pair.x_t, pair.alpha_t).flatten(0, 1).detach().requires_grad_()
        value = way(hidden)
        found.append((value.detach(), *gradients(value, student, hidden)))
    for one, other in zip(*found, strict=True):
        assert torch.allclose(one, other, atol=1e-9)
