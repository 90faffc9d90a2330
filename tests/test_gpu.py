"""What an accelerator must agree on with the CPU. Skipped where there is none."""

import dataclasses
import shutil
from pathlib import Path

import pytest
import torch

from cdlm.methods import METHODS
from cdlm.model import SIZES, Denoiser, frozen_copy
from cdlm.process import masked, uniform, unigram
from cdlm.rng import seeded

pytestmark = pytest.mark.gpu


def test_every_device_draws_the_same_bits() -> None:
    rng = seeded(5, "bits", batch=64)
    assert torch.equal(rng.uniform(333), rng.uniform(333, "cuda").cpu())


@pytest.mark.parametrize(
    "process", [masked(101), uniform(101), unigram(torch.arange(1.0, 102.0))], ids=lambda p: p.name
)
def test_corruption_and_bridges_are_the_same_tokens(process) -> None:
    rng = seeded(6, batch=32)
    x0 = rng("data").integers(200, 101)
    x_t, x_t_gpu = process.corrupt(x0, 0.7, rng), process.corrupt(x0.cuda(), 0.7, rng)
    assert torch.equal(x_t, x_t_gpu.cpu())
    x_s, x_s_gpu = process.bridge(x0, x_t, 0.2, 0.7, rng), process.bridge(x0.cuda(), x_t_gpu, 0.2, 0.7, rng)
    assert torch.equal(x_s, x_s_gpu.cpu())


@pytest.mark.filterwarnings("default")  # the compiler has warnings of its own
@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("compiled", [False, True])
def test_loss_and_gradient_agree_with_the_cpu(name: str, compiled: bool) -> None:
    method, vocab = METHODS[name], 211
    process = method.default_process(vocab)
    shape = dataclasses.replace(SIZES["tiny"], causal=process is None, time_conditioning=method.time_conditioning)
    torch.manual_seed(0)
    student = Denoiser(shape, process, vocab)
    for parameter in student.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    target = frozen_copy(student)
    for parameter in target.parameters():
        parameter += 0.02 * torch.randn_like(parameter)
    objective, x0 = method(process, total=100), seeded(1, batch=8).integers(32, vocab)
    found = []
    for device in ("cpu", "cuda"):
        nets = [frozen_copy(net).to(device) for net in (student, target)]
        nets[0].requires_grad_(True)
        if compiled and device == "cuda":
            nets[0].backbone.compile()
        loss = objective.loss(nets[0], nets[1], x0.to(device), 30, seeded(2, batch=8))
        loss.total.backward()
        found.append((loss.total.item(), [parameter.grad.cpu() for parameter in nets[0].parameters()]))
    (loss_cpu, grads_cpu), (loss_gpu, grads_gpu) = found
    assert loss_gpu == pytest.approx(loss_cpu, rel=1e-3, abs=1e-5)
    for a, b in zip(grads_cpu, grads_gpu, strict=True):
        assert (a - b).norm() <= 1e-2 * a.norm() + 1e-6


def test_a_run_on_a_gpu_learns_and_resumes_from_the_cpu(tmp_path: Path) -> None:
    from cdlm.data.prepare import PrepareConfig, prepare
    from cdlm.recipes import RECIPES
    from cdlm.train.loop import train

    (tmp_path / "text.txt").write_text("the cat sees the sea and the sea sees the cat. " * 400)
    text = str(tmp_path / "text.txt")
    prepare(PrepareConfig((text,), tmp_path / "tokens", packing="plain", length=32, valid=(text,)))
    config = dataclasses.replace(
        RECIPES["tiny-mcdlm"].config, data=tmp_path / "tokens", out=tmp_path / "run", device="cuda", dtype="bfloat16",
        steps=60, length=32, save_every=30, samples=1,
    )  # fmt: skip
    last = train(config)
    assert last.name == "step-00000060"
    shutil.rmtree(last)
    assert train(dataclasses.replace(config, device="cpu"), "auto").name == "step-00000060"
