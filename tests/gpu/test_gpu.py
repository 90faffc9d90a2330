"""What an accelerator must agree on with the CPU. Skipped where there is none."""

import dataclasses
import shutil
from pathlib import Path

import pytest
import torch

from cdlm.methods import METHODS
from cdlm.model.compile import accelerate
from cdlm.model.config import SIZES
from cdlm.model.denoiser import Denoiser
from cdlm.model.ema import frozen_copy
from cdlm.process import Process, masked, uniform, unigram
from cdlm.rng import seeded
from cdlm.sample.draw import last
from cdlm.sample.generate import generate
from cdlm.sample.settings import resolve

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


@pytest.mark.parametrize("tied", [False, True])
def test_a_run_on_a_gpu_learns_and_resumes_from_the_cpu(tied: bool, tmp_path: Path) -> None:
    from cdlm.data.config import PrepareConfig
    from cdlm.data.prepare import prepare
    from cdlm.train.loop import train
    from cdlm.train.recipes import RECIPES

    (tmp_path / "text.txt").write_text("the cat sees the sea and the sea sees the cat. " * 400)
    text = str(tmp_path / "text.txt")
    prepare(PrepareConfig((text,), tmp_path / "tokens", packing="plain", seq_length=32, valid=(text,)))
    config = dataclasses.replace(
        RECIPES["tiny-mcdlm"].config, data=tmp_path / "tokens", out=tmp_path / "run", device="cuda", dtype="bfloat16",
        steps=60, seq_length=32, save_every=30, valid_samples=1,
        network=dataclasses.replace(SIZES["tiny"], tie_embeddings=tied),
    )  # fmt: skip
    last = train(config)
    assert last.name == "step-00000060"
    shutil.rmtree(last)
    assert train(dataclasses.replace(config, device="cpu"), "auto").name == "step-00000060"


SAMPLERS = {
    "masked": (masked, {}),
    "greedy final step": (masked, {"final_step": "argmax"}),
    "many steps": (masked, {"steps": 100}),
    "corrector": (masked, {"corrector": "rescale", "eta": 0.3}),
    "dilated": (masked, {"order": "dilated"}),
    "equal steps": (masked, {"steps": 7, "step_size": "equal"}),
    "plain": (masked, {"sampler": "plain", "steps": 7}),
    "first-hitting": (masked, {"order": "first-hitting"}),
    "margin": (masked, {"order": "margin", "steps": 6}),
    "top-p": (masked, {"top_p": 0.8, "temperature": 0.9}),
    "uniform": (uniform, {"final_step": "argmax"}),
    "uniform, mixture": (uniform, {"posterior": "mixture"}),
    "uniform, corrector": (uniform, {"corrector": "constant", "eta": 0.3}),
}


def lively(process: Process | None, vocab: int = 211, **shape) -> Denoiser:
    shape = {"causal": process is None, "time_conditioning": process is not None, **shape}
    denoiser = Denoiser(dataclasses.replace(SIZES["tiny"], **shape), process, vocab).eval().requires_grad_(False)
    torch.manual_seed(1)
    for parameter in denoiser.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    return denoiser


@pytest.mark.parametrize("name", SAMPLERS)
def test_samplers_draw_the_same_tokens_as_the_cpu(name: str) -> None:
    """In double precision, where rounding decides nothing."""
    kind, settings = SAMPLERS[name]
    process = kind(211)
    denoiser, resolved, found = lively(process).double(), resolve(settings, process), []
    for device in ("cpu", "cuda"):
        rng = seeded(3, batch=6)
        x = process.start(40, rng("start"), device)
        state = last(generate(denoiser.to(device), process, x, resolved, rng))
        found.append((state.x.cpu(), state.nfe))
    assert torch.equal(found[0][0], found[1][0])
    assert found[0][1] == found[1][1]


def test_autoregressive_graph_draws_the_same_tokens_as_the_cpu() -> None:
    denoiser, found = lively(None).double(), []
    for device in ("cpu", "cuda"):
        x = torch.nn.functional.pad(torch.tensor([[1, 2, 3], [4, 5, 6]]), (0, 47)).to(device)
        given = (torch.arange(50, device=device) < 3).expand(2, -1)
        states = generate(denoiser.to(device), None, x, resolve({}, None), seeded(3, batch=2), given=given)
        found.append(last(states).x.cpu())
    assert torch.equal(*found)


@pytest.mark.filterwarnings("default")  # the compiler has warnings of its own
@pytest.mark.parametrize("kind", [masked, uniform])
def test_accelerated_network_and_sampler_agree_with_the_plain_ones(kind) -> None:
    process = kind(211)
    plain, fast = lively(process, num_layers=3).cuda(), lively(process, num_layers=3).cuda()
    accelerate(fast)
    x, alpha = process.start(64, seeded(0, batch=4), "cuda"), torch.full((4,), 0.3, device="cuda")
    x[:, 10:30] = torch.arange(20, device="cuda")
    rows = torch.tensor([[3, 40, 41, 63]], device="cuda").expand(4, 4)
    for chosen in (None, rows, rows[:, :2]):
        for _ in range(2):  # recorded, then replayed
            one, other = plain.features(x, alpha, chosen), fast.features(x, alpha, chosen)
            assert torch.allclose(one, other, atol=1e-4)
    assert torch.allclose(plain.logits(one), fast.logits(other), atol=1e-4)
    rng = seeded(5, batch=4)
    start = process.start(64, rng("start"), "cuda")
    slow, quick = (
        last(generate(net, process, start, resolve({"steps": 8}), rng, compiled=compiled))
        for net, compiled in ((plain, False), (fast, True))
    )
    assert quick.nfe == slow.nfe
    assert (quick.x == slow.x).float().mean() > 0.9  # the same plan and noise; rounding may turn a token or two


@pytest.mark.filterwarnings("default")
def test_bfloat16_activation_within_the_product_is_the_tanh_approximation() -> None:
    denoiser = lively(masked(211)).cuda().bfloat16()
    block, x = denoiser.backbone.blocks[0], torch.randn(2, 16, 64, device="cuda").bfloat16()
    with torch.no_grad():
        within = block._widen(x).float()
        truth = block.mlp.float()(x.float())
    assert (within - truth).abs().max() < 0.02 * truth.abs().max()
