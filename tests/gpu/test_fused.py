"""The fused objective on a GPU: compiled kernels, padded heads and whole chunks, against the plain definition there."""

import dataclasses

import pytest
import torch

from cdlm.methods import METHODS
from cdlm.model.config import SIZES
from cdlm.model.denoiser import Denoiser
from cdlm.model.ema import frozen_copy
from cdlm.objective.coupling import Bridge
from cdlm.objective.divergence import DIVERGENCES
from cdlm.objective.fused import Summands, weighted_sums
from cdlm.objective.loss import weighted_divergence
from cdlm.objective.target import Data, Network
from cdlm.process import masked, uniform
from cdlm.rng import seeded

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]  # the compiler has warnings of its own

V, L, B = 1003, 64, 48


def nets(process):
    torch.manual_seed(0)
    shape = dataclasses.replace(SIZES["tiny"], time_conditioning=True)
    student = Denoiser(shape, process)
    for parameter in student.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    student = student.cuda()
    target = frozen_copy(student)
    for parameter in target.parameters():
        parameter += 0.05 * torch.randn_like(parameter)
    return student, target


@pytest.mark.parametrize(
    ("name", "kind", "process"),
    [
        ("kl", "point", masked(V)),
        ("jsd", "point", masked(V)),
        ("jsd", "law", masked(V)),
        ("reverse_kl", "law", uniform(V)),
        ("rate_kl", "point", uniform(V)),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_are_those_of_the_definition(name, kind, process, dtype) -> None:
    student, target = nets(process)
    t = torch.linspace(0.3, 0.95, B, dtype=torch.float64)
    rng = seeded(3, batch=B)
    pair = Bridge(process)(rng("x").integers(L, V), t / 2, t, rng)
    groups = Data()(pair) if kind == "point" else Network()(pair, target)[1:]
    parts = [Summands(i, goal, rng("w").uniform(L).flatten()[i], DIVERGENCES[name], pair.at(i)) for i, goal in groups]
    hidden = student.features(pair.x_t, pair.alpha_t).flatten(0, 1).detach().requires_grad_()
    inputs = [hidden, *student.backbone.output_layer.linear.parameters()]
    with torch.autocast("cuda", torch.bfloat16, enabled=dtype == torch.bfloat16):
        found, _ = weighted_sums(student, hidden, parts)
        truth = sum(weighted_divergence(part, student, hidden).sum() for part in parts)
    close = 2e-2 if dtype == torch.bfloat16 else 1e-3
    torch.testing.assert_close(found, truth.to(found.dtype), rtol=close / 10, atol=0)
    for ours, theirs in zip(torch.autograd.grad(found, inputs), torch.autograd.grad(truth, inputs), strict=True):
        assert float((ours - theirs).norm() / theirs.norm()) < close


@pytest.mark.parametrize(("dtype", "close"), [(torch.float32, 0.01), (torch.bfloat16, 0.04)])
def test_300_steps_take_the_same_course(dtype, close) -> None:
    """MCDLM, fused and by its definition: the same losses, but for rounding, which grows with the learning rate."""

    def course(plain: bool) -> list[float]:
        torch.manual_seed(0)
        student = Denoiser(SIZES["tiny"], masked(V)).cuda()
        target, objective = frozen_copy(student), METHODS["mcdlm"](masked(V), 300)
        optimizer, losses = torch.optim.AdamW(student.parameters(), lr=5e-4), []
        for step in range(300):
            rng = seeded(step, batch=B)
            x0 = (rng("x").integers(1, 50) + 7 * torch.arange(L)) % V  # each text counts up in sevens
            with torch.autocast("cuda", torch.bfloat16, enabled=dtype == torch.bfloat16):
                loss = objective.loss(student, target, x0, step, rng, plain=plain).total
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        return torch.stack(losses).view(10, 30).mean(1).tolist()

    found = course(plain=False)
    assert found == pytest.approx(course(plain=True), rel=close)
    assert found[-1] < 0.5 * found[0]
