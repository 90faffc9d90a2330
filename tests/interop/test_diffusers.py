"""diffusers: `CDLMScheduler` in its pipeline, its schedulers on our models, and its posterior beside ours."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from cdlm.process import Process, masked, uniform
from cdlm.process.noise import LogLinear
from cdlm.process.process import bridge_law, transition
from cdlm.rng import seeded
from cdlm.sample.draw import last
from cdlm.sample.generate import generate
from cdlm.sample.settings import resolve

from ..writers import small

diffusers = pytest.importorskip("diffusers", reason='pip install -e ".[diffusers]"')
transformers = pytest.importorskip("transformers")

from cdlm.interop.diffusers import CDLMPipeline, CDLMScheduler  # noqa: E402

MASK, VOCAB = 4, 24
"""The mask lies in the middle of the vocabulary, as in models of other people."""
SAMPLERS: list[dict[str, Any]] = [
    {},
    {"step_size": "equal"},
    {"order": "dilated"},
    {"order": "bit-reversed", "timesteps": "cosine"},
    {"order": "probability"},
    {"order": "margin", "temperature_end": 0.5},
    {"order": "entropy-bound", "entropy_bound": 4.0},
]


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def block_seed(seed: int) -> int:
    """The integer that the scheduler takes from the generator for its first block."""
    return int(torch.randint(2**62, (1,), generator=generator(seed)))


@pytest.fixture(scope="module")
def bert() -> Any:
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=VOCAB, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32
    )
    model = transformers.BertForMaskedLM(config).eval().double()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, 0, 0.3)
    return model


@pytest.mark.parametrize("sampler", SAMPLERS, ids=str)
def test_in_the_pipeline_of_llada2_it_draws_what_our_sampler_draws(bert: Any, sampler: dict[str, Any]) -> None:
    """One block that holds the prompt and all that is generated: the same tokens, one for one."""
    prompt, gen_length, steps = torch.tensor([[7, 9, 11], [8, 8, 8]]), 13, 5
    pipe = diffusers.LLaDA2Pipeline(bert, CDLMScheduler(**sampler))
    pipe.set_progress_bar_config(disable=True)
    found = pipe(
        input_ids=prompt,
        gen_length=gen_length,
        block_length=prompt.shape[1] + gen_length,
        num_inference_steps=steps,
        temperature=0.8,
        top_k=9,
        mask_token_id=MASK,
        generator=generator(3),
        output_type="seq",
    ).sequences

    def predict(x: Tensor, t: float) -> Tensor:
        logits = bert(torch.where(x == VOCAB, MASK, x)).logits
        return logits.index_fill(-1, torch.tensor([MASK]), -torch.inf).log_softmax(-1)

    x = torch.cat([prompt, torch.full((2, gen_length), VOCAB)], 1)
    settings = resolve({**sampler, "steps": steps, "temperature": 0.8, "top_k": 9}, masked(VOCAB))
    expected = last(generate(predict, masked(VOCAB), x, settings, seeded(block_seed(3), batch=2))).x
    assert torch.equal(found, expected[:, prompt.shape[1] :])


def test_several_blocks_keep_what_is_there_and_leave_no_mask(bert: Any) -> None:
    pipe = diffusers.LLaDA2Pipeline(bert, CDLMScheduler(order="dilated"))
    pipe.set_progress_bar_config(disable=True)
    arguments: dict[str, Any] = {
        "input_ids": torch.tensor([[7, 9, 11, 5, 6]]),
        "gen_length": 14,
        "block_length": 4,
        "num_inference_steps": 2,
        "mask_token_id": MASK,
        "output_type": "seq",
    }
    drawn = [pipe(**arguments, temperature=1.0, generator=generator(seed)).sequences for seed in (0, 0, 1)]
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])
    assert drawn[0].shape == (1, 14)
    assert not (torch.cat(drawn) == MASK).any()
    greedy = [pipe(**arguments, generator=generator(seed)).sequences for seed in (0, 0)]  # its temperature is 0
    assert torch.equal(*greedy)


@pytest.mark.parametrize("sampler", SAMPLERS, ids=str)
def test_in_our_pipeline_it_draws_what_our_sampler_draws(sampler: dict[str, Any]) -> None:
    """Guidance included, which needs the model; two blanks, so that the given tokens matter."""
    model = small("masked", "bpe")
    pipe = CDLMPipeline(model, CDLMScheduler(**sampler))
    text = "the ______ sat on [MASK:9] old sea."
    found = pipe(
        text,
        num_inference_steps=4,
        guidance_scale=1.5,
        temperature=0.9,
        num_samples=3,
        generator=generator(2),
        output_type="seq",
    )
    template = model.infillings([text] * 3)
    settings = model.resolve({**sampler, "steps": 4, "guidance": 0.5, "temperature": 0.9})
    x = torch.tensor([one.token_ids for one in template])
    x = torch.where(x < 0, model.denoiser.vocab, x)
    banned = (*template[0].banned, *range(model.tokenizer.vocab_size, model.denoiser.vocab))
    states = generate(
        model.denoiser, model.denoiser.process, x, settings, seeded(block_seed(2), batch=3), banned=banned
    )
    assert found.sequences == last(states).x.tolist()


@pytest.mark.parametrize(
    "scheduler",
    [
        lambda: diffusers.DiscreteDDIMScheduler(),
        lambda: diffusers.DiscreteDDIMScheduler(corrector_steps=1),
        lambda: diffusers.EntropyBoundScheduler(),
        lambda: diffusers.BlockRefinementScheduler(),
    ],
)
def test_a_uniform_model_under_its_schedulers(scheduler: Any) -> None:
    model = small("uniform", "bpe")
    pipe = CDLMPipeline(model, scheduler())
    found = pipe("the cat", gen_length=9, num_inference_steps=6, generator=generator(0), num_samples=2)
    again = pipe("the cat", gen_length=9, num_inference_steps=6, generator=generator(0), num_samples=2)
    assert found.sequences == again.sequences
    assert found.nfe == 6  # the passes of the corrector included
    assert [len(ids) for ids in found.sequences] == [9, 9]
    assert all(text.startswith("the cat") for text in found.texts)
    assert max(max(ids) for ids in found.sequences) < model.tokenizer.vocab_size


def test_a_masked_model_under_block_refinement_in_blocks() -> None:
    pipe = CDLMPipeline(small("masked", "bpe"), diffusers.BlockRefinementScheduler())
    seen = []

    def watch(pipe: Any, step: int, timestep: int, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        seen.append(int((tensors["block_x"] == pipe.denoiser.vocab).sum()))
        return tensors

    found = pipe(
        ["the cat", "a dog likes"],
        gen_length=12,
        block_length=6,
        num_inference_steps=3,
        temperature=0.7,
        generator=generator(1),
        callback_on_step_end=watch,
    )
    assert [len(ids) for ids in found.sequences] == [12, 12]
    assert found.texts[1].startswith("a dog likes")
    assert seen == sorted(seen[: len(seen) // 2], reverse=True) + sorted(seen[len(seen) // 2 :], reverse=True)
    assert seen[-1] == 0


def posterior_of_diffusers(
    monkeypatch: pytest.MonkeyPatch, logits: Tensor, sample: Tensor, x0: int, step: int, steps: int
) -> tuple[Tensor, Tensor]:
    """The distributions of x_0 and of x_s given x_0 that its own `step` draws from, with x_0 fixed: exact."""
    scheduler = diffusers.DiscreteDDIMScheduler()
    scheduler.set_timesteps(steps)
    passed: list[Tensor] = []

    def multinomial(probs: Tensor, num_samples: int, **rest: Any) -> Tensor:
        passed.append(probs)
        return torch.full((len(probs), 1), x0) if len(passed) == 1 else torch.zeros(len(probs), 1, dtype=torch.long)

    monkeypatch.setattr(torch, "multinomial", multinomial)
    scheduler.step(logits[None, None], step, sample[None, None], temperature=1.0)
    monkeypatch.undo()
    clean, stay, noise = passed[1][0].double()
    k = len(logits)
    law = torch.full((k,), float(noise) / k, dtype=torch.float64)
    law[x0] += clean
    law[sample] += stay
    return passed[0][0].double(), law


@pytest.mark.parametrize("step", [0, 1, 3, 4])
def test_its_ddim_posterior_is_our_mixture(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """q(x_s | x_t, x_0) for every x_t and x_0, and the mixture over a predicted x_0: equal to 1e-6."""
    k, steps = 5, 5
    process = Process(k, uniform(k).prior, LogLinear(eps=0.0))
    t, s = 1 - step / steps, 1 - (step + 1) / steps
    q_s, q_ts = transition(process, 0.0, s), transition(process, s, t)
    logits = torch.linspace(-1, 2, k)
    for x_t in range(k):
        mixture = torch.zeros(k, dtype=torch.float64)
        for x0 in range(k):
            law0, law = posterior_of_diffusers(monkeypatch, logits, torch.tensor(x_t), x0, step, steps)
            point = torch.nn.functional.one_hot(torch.tensor([x0]), k).double()
            exact = bridge_law(point, torch.tensor([x_t]), q_s, q_ts)[0]
            assert torch.allclose(law, exact, atol=1e-6)
            mixture += law0[x0] * law
        predicted = logits.double().softmax(-1)
        exact = sum(
            predicted[x0] * bridge_law(torch.eye(k, dtype=torch.float64)[x0][None], torch.tensor([x_t]), q_s, q_ts)[0]
            for x0 in range(k)
        )
        assert torch.allclose(mixture, exact, atol=1e-6)
        plug_in = bridge_law(predicted[None], torch.tensor([x_t]), q_s, q_ts)[0]
        if 0 < step < steps - 1:
            assert not torch.allclose(mixture, plug_in, atol=1e-3)  # the other posterior is another distribution


def test_saved_pipelines_open_with_their_scheduler(tmp_path: Path) -> None:
    pipe = CDLMPipeline(small("masked", "bpe"), CDLMScheduler(order="margin", step_size="random"))
    pipe.save_pretrained(tmp_path / "mine")
    again = CDLMPipeline.from_pretrained(tmp_path / "mine", device="cpu", dtype="float64")
    assert isinstance(again.scheduler, CDLMScheduler)
    assert again.scheduler.config.order == "margin"
    first, second = (one("the", gen_length=6, num_inference_steps=3, generator=generator(0)) for one in (pipe, again))
    assert first.texts == second.texts
    pipe.scheduler = diffusers.BlockRefinementScheduler(threshold=0.5)
    pipe.save_pretrained(tmp_path / "other")
    assert CDLMPipeline.from_pretrained(tmp_path / "other").scheduler.config.threshold == 0.5
    (tmp_path / "other" / "scheduler" / "scheduler_config.json").write_text('{"_class_name": "os"}')
    with pytest.raises(ValueError, match="'os'"):
        CDLMPipeline.from_pretrained(tmp_path / "other")


def test_the_bundled_model_gets_the_order_of_its_generation_config() -> None:
    pipe = CDLMPipeline.from_pretrained("mdlm", device="cpu")
    assert pipe.scheduler.config.order == "dilated"
    found = pipe("The river", gen_length=12, num_inference_steps=4, generator=generator(0))
    assert found.texts[0].startswith("The river")
    assert found.nfe <= 4


def test_what_does_not_fit_is_refused() -> None:
    model, other = small("masked", "bpe"), small("uniform", "bpe")
    with pytest.raises(ValueError, match=r"guidance_scale=1\.5"):
        CDLMScheduler(guidance=0.5)
    with pytest.raises(ValueError, match="--order must be"):
        CDLMScheduler(order="alphabetical")
    with pytest.raises(ValueError, match="first-hitting"):
        CDLMScheduler(order="first-hitting")
    with pytest.raises(ValueError, match="mask_token_id"):
        CDLMScheduler().step(torch.zeros(1, 2, 3), 0, torch.zeros(1, 2, dtype=torch.long))
    with pytest.raises(ValueError, match="is masked; use CDLMScheduler"):
        CDLMPipeline(model, diffusers.DiscreteDDIMScheduler())("the", num_inference_steps=2)
    with pytest.raises(ValueError, match="use DiscreteDDIMScheduler"):
        CDLMPipeline(other, CDLMScheduler())("the", num_inference_steps=2)
    with pytest.raises(ValueError, match="leave out block_length"):
        CDLMPipeline(other, diffusers.DiscreteDDIMScheduler())("the", num_inference_steps=2, block_length=4)
    with pytest.raises(ValueError, match="autoregressive"):
        CDLMPipeline(small("causal", "bpe"), CDLMScheduler())
    with pytest.raises(ValueError, match="gen_length must be at least 1"):
        CDLMPipeline(model, CDLMScheduler())("the", gen_length=0)
