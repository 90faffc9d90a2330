"""transformers: the file in model directories against the package, and directories in an environment without it."""

import dataclasses
import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import cdlm
from cdlm import zoo
from cdlm.model.config import NetworkConfig
from cdlm.model.denoiser import Denoiser
from cdlm.model.pretrained import model_config
from cdlm.process import Cosine, Process, masked, uniform
from cdlm.process.order import bit_reversed_order, dilated_order, random_order
from cdlm.rng import Rng, seeded
from cdlm.sample.draw import make_draw
from cdlm.sample.order import step_of_level
from cdlm.sample.settings import preset_for, resolve
from cdlm.sample.timesteps import uniform_times
from cdlm.text.template import OPEN, Template, until_eos, without_padding

from ..sample.truth import PRIORS, L, V, agrees, ancestor, clamped, composed, noise, point, push
from ..writers import BPE, spelled, write_model

transformers = pytest.importorskip("transformers", reason='pip install -e ".[eval]"')

from cdlm.interop import modeling_cdlm  # noqa: E402
from cdlm.interop.modeling_cdlm import CDLMConfig, CDLMForCausalLM, CDLMForMaskedLM  # noqa: E402

ROWS = 5_000
NETWORKS: list[dict[str, Any]] = [
    {},
    {"time_conditioning": True},
    {"position_embeddings": 12},
    {"grid_embeddings": 4},
    {"tie_embeddings": True},
    {"time_conditioning": True, "position_embeddings": 12, "tie_embeddings": True},
]
PROCESSES = {
    **PRIORS,
    "cosine": masked(V, Cosine()),
    "uniform cosine": uniform(V, Cosine(0.01)),
}


def wrap(denoiser: Denoiser, text: dict[str, Any] | None = None, **fields: Any) -> Any:
    """The model of the file over the same weights; `fields` are those of its generation config."""
    config = model_config(denoiser)
    if denoiser.process is not None:
        config["process"]["num_states"] = denoiser.process.states
    kind = CDLMForCausalLM if denoiser.process is None else CDLMForMaskedLM
    model = kind(CDLMConfig(**config, text=text or {})).to(denoiser.dtype).eval().requires_grad_(False)
    model.load_state_dict(denoiser.state_dict(), strict=False)
    if denoiser.process is not None:
        model.prior = denoiser.process.prior.clone()
    model.generation_config = transformers.GenerationConfig(**fields)
    return model


def network(process: Process | None, dtype: torch.dtype, vocab: int | None = None, **more: Any) -> Denoiser:
    config = NetworkConfig(16, 3, 2, 8, 0.1, causal=process is None, **more)
    denoiser = Denoiser(config, process, vocab)
    torch.manual_seed(0)
    for parameter in denoiser.parameters():
        torch.nn.init.normal_(parameter, 0, 0.3)
    return denoiser.to(dtype).eval().requires_grad_(False)


def lively(process: Process, **more: Any) -> Denoiser:
    """In double precision, with predictions that depend on what they see."""
    denoiser = network(process, torch.float64, **more)
    torch.manual_seed(1)
    for name, parameter in denoiser.named_parameters():
        if "embed" in name or "attn" in name:
            torch.nn.init.normal_(parameter, 0, 1.0)
    return denoiser


def same(found: Tensor, expected: Tensor) -> bool:
    return torch.equal(found.isinf(), expected.isinf()) and torch.allclose(found, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("process", PROCESSES)
def test_logits_are_those_of_the_package(process: str, dtype: torch.dtype) -> None:
    about = PROCESSES[process]
    x = torch.randint(0, about.states, (3, 9), generator=torch.Generator().manual_seed(0))
    x[0, :4] = about.states - 1
    for more in NETWORKS:
        denoiser = network(about, dtype, **more)
        model = wrap(denoiser)
        for t in (torch.tensor([1.0, 0.4, 0.0]), 0.7):
            assert same(model(x, timesteps=t).logits, denoiser(x, t)), more


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_next_token_logits_are_those_of_the_package(dtype: torch.dtype) -> None:
    x = torch.randint(0, V, (3, 9), generator=torch.Generator().manual_seed(0))
    for more in ({}, {"position_embeddings": 12}, {"grid_embeddings": 6}, {"tie_embeddings": True}):
        denoiser = network(None, dtype, V, **more)
        found = wrap(denoiser)(x, labels=x)
        assert same(found.logits.float().log_softmax(-1), denoiser(x))
        expected = -denoiser(x)[:, :-1].gather(-1, x[:, 1:, None]).mean()
        assert float(found.loss) == pytest.approx(float(expected), rel=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("process", ["masked", "uniform", "causal"])
def test_padding_changes_nothing(process: str, dtype: torch.dtype) -> None:
    """On the left, on the right, and within: as if it were not there."""
    about = PROCESSES.get(process)
    states = about.states if about else V
    x = torch.randint(0, states, (3, 9), generator=torch.Generator().manual_seed(0))
    real = torch.ones_like(x)
    real[0, :3] = real[1, 7:] = real[2, 2:5] = 0
    # a mask selects another kernel of the attention, which rounds differently
    tolerance = 1e-6 if dtype == torch.float32 else 0.1
    for more in ({}, {"position_embeddings": 9}, *([{"time_conditioning": True}] if about else [])):
        denoiser = network(about, dtype, None if about else V, **more)
        extra = {"timesteps": 0.6} if about else {}
        found = wrap(denoiser)(x, attention_mask=real, **extra).logits.float().log_softmax(-1).exp()
        for row, mask, law in zip(x, real.bool(), found, strict=True):
            expected = denoiser(row[mask][None], 0.6)[0].float().exp()
            assert torch.allclose(law[mask], expected, rtol=0, atol=tolerance)


def test_a_joint_head_is_refused() -> None:
    with pytest.raises(ValueError, match="has a joint head, which this file does not support"):
        wrap(network(PROCESSES["masked"], torch.float32, joint_layers=1))


def test_the_file_imports_torch_and_transformers_only() -> None:
    source = Path(modeling_cdlm.__file__).read_text()
    imported = {line.split()[1].split(".")[0] for line in source.splitlines() if line.startswith(("import ", "from "))}
    assert imported == {"dataclasses", "math", "typing", "torch", "transformers"}


@pytest.mark.parametrize("process", PROCESSES)
@pytest.mark.parametrize("posterior", ["plug-in", "mixture"])
def test_texts_have_the_law_of_ancestral_sampling(process: str, posterior: str) -> None:
    """By enumeration of every state, for one step and for several."""
    about = PROCESSES[process]
    denoiser = lively(about, time_conditioning=True)
    model = wrap(denoiser, {"max_length": L, "posterior": posterior})
    kernel = ancestor(about, lambda x, t: denoiser.head(denoiser.features(x, alpha(about, t, x))).exp(), posterior)
    for steps in (1, 3):
        found = model.generate(max_denoising_steps=steps, num_return_sequences=ROWS, seed=steps)
        law = composed(noise(about), about, L, kernel, uniform_times(steps))
        assert agrees(found.sequences, law, about.states)


def alpha(process: Process, t: float, x: Tensor) -> Tensor:
    return process.noise.alpha(torch.full((len(x),), t, dtype=torch.float64))


SHAPED: list[dict[str, Any]] = [
    {"temperature": 0.5},
    {"temperature": 2.0, "temperature_end": 0.3},
    {"top_k": 2},
    {"top_p": 0.6},
    {"guidance": 1.5},
    {"log_frequency_penalty": 2.0},
    {"frequency_penalty": 1.5, "presence_penalty": -1.0},
    {"guidance": 0.5, "temperature": 0.8, "top_k": 2, "log_frequency_penalty": -1.0, "frequency_penalty": 0.5},
]


@pytest.mark.parametrize("given", SHAPED, ids=str)
def test_shaped_texts_have_the_law_of_our_sampler(given: dict[str, Any]) -> None:
    """Of the logits processors of the package, hop by hop over every state."""
    about = masked(V)
    denoiser = lively(about, position_embeddings=3)
    start = torch.full((4**3, 3), V)
    draw = make_draw(denoiser, about, start, resolve({"steps": 2, **given}, about), prompt=start < 0)
    kernel = ancestor(about, lambda x, t: draw.log_probs(denoiser, about, x, t).exp())
    law = composed(noise(about, 3), about, 3, kernel, uniform_times(2))
    found = wrap(denoiser, {"max_length": 3}).generate(
        max_denoising_steps=2, num_return_sequences=ROWS, seed=0, **given
    )
    assert agrees(found.sequences, law, V + 1)


def test_two_temperatures_are_those_of_transformers() -> None:
    """t_max in the first step, falling to t_min, as its LinearTemperatureScheduleLogitsProcessor has it."""
    model = wrap(lively(masked(V)), {"max_length": 5})
    fall = model.generate(t_max=1.5, t_min=0.2, max_denoising_steps=4, seed=1).sequences
    assert torch.equal(
        fall, model.generate(temperature=1.5, temperature_end=0.2, max_denoising_steps=4, seed=1).sequences
    )
    from transformers.models.diffusion_gemma import generation_diffusion_gemma

    theirs = generation_diffusion_gemma.LinearTemperatureScheduleLogitsProcessor(0.2, 1.5, 4)
    for number, t in enumerate(uniform_times(4)[:-1].tolist()):
        ours = 0.2 + (1.5 - 0.2) * t
        assert float(theirs(None, torch.ones(1), 4 - number)) == pytest.approx(1 / ours)


def test_of_dilated_order_each_step_has_the_law_of_its_positions() -> None:
    """Of three positions two steps draw the outer ones and the middle one, in either turn."""
    about = masked(V)
    denoiser = lively(about, position_embeddings=3)
    found = wrap(denoiser, {"max_length": 3}).generate(
        order="dilated", max_denoising_steps=2, num_return_sequences=ROWS, seed=0
    )
    reveal = lambda x, t, s: torch.nn.functional.pad(denoiser(x, t).exp(), (0, 1))  # noqa: E731
    outer = torch.tensor([True, False, True])
    law = torch.zeros(4**3, dtype=torch.float64)
    for first in (outer, ~outer):
        one = push(noise(about, 3), about, 3, clamped(reveal, ~first), 1.0, 0.5)
        law += push(one, about, 3, clamped(reveal, first), 0.5, 0.0) / 2
    assert agrees(found.sequences, law, V + 1)
    assert (found.tokens_per_forward == 1.5).all()


@pytest.mark.parametrize("order", [random_order, dilated_order, bit_reversed_order])
def test_orders_are_those_of_the_package(order: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the same noise, the same levels."""
    rng = seeded(0, batch=5)
    is_mask = torch.rand(5, 40, generator=torch.Generator().manual_seed(0)) < 0.7

    def uniform_of(shape: Any, generator: None) -> Tensor:
        stream: Rng = rng("offset" if tuple(shape) == (5, 1) else "reveal")
        return stream.uniform(shape[1])

    monkeypatch.setattr(modeling_cdlm, "_uniform", uniform_of)
    name = order.__name__.removesuffix("_order").replace("_", "-")
    found = modeling_cdlm.unmasking_levels(name, is_mask, 8, None)
    assert torch.equal(found, order(is_mask, 8, rng))


def test_steps_unmask_at_their_levels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also on a schedule whose shares of masks are not those of the times; steps without tokens cost nothing."""
    about = masked(V, Cosine())
    level = torch.rand(3, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    level[0] = level[0] * 0.1
    monkeypatch.setattr(modeling_cdlm, "unmasking_levels", lambda *arguments: level)
    expected = step_of_level(about, level, uniform_times(6))
    states: list[Tensor] = []
    out = wrap(lively(about), {"max_length": 9}).generate(
        streamer=Recorder(states), num_return_sequences=3, max_denoising_steps=6, seed=0
    )
    drafts = torch.stack(states[1:-1])
    assert torch.equal((drafts == V).sum(0), expected)
    steps = torch.tensor([len(row.unique()) for row in expected])
    assert torch.allclose(out.tokens_per_forward, 9 / steps)


@dataclasses.dataclass
class Recorder:
    """A streamer that keeps what it gets."""

    states: list[Any]

    def put(self, value: Tensor) -> None:
        self.states.append(value.clone())

    def put_draft(self, value: Tensor) -> None:
        self.states.append(value.clone())

    def end(self) -> None:
        self.states.append(None)


def test_infilling_has_the_law_given_the_rest() -> None:
    about = masked(V)
    denoiser = lively(about, position_embeddings=4)
    x = torch.tensor([[1, V, V, 0]])
    found = wrap(denoiser).generate(x, max_denoising_steps=2, num_return_sequences=ROWS, seed=0).sequences
    kernel = ancestor(about, lambda x, t: denoiser.head(denoiser.features(x, alpha(about, t, x))).exp())
    law = composed(point(x[0], V + 1)[None].reshape(-1), about, 4, kernel, uniform_times(2))
    assert agrees(found, law, V + 1)


@pytest.mark.parametrize("padding", ["left", "right"])
@pytest.mark.parametrize("process", ["masked", "uniform"])
def test_padded_prompts_are_continued_as_if_alone(process: str, padding: str) -> None:
    """Two prompts of different lengths in one batch: each has the law that it has alone."""
    about = PROCESSES[process]
    denoiser = lively(about, time_conditioning=True, position_embeddings=4)
    model = wrap(denoiser)
    x, real = torch.tensor([[1, 2], [0, 2]]), torch.tensor([[1, 1], [0, 1]])
    if padding == "right":
        x, real = torch.tensor([[1, 2], [2, 0]]), torch.tensor([[1, 1], [1, 0]])
    out = model.generate(
        x, attention_mask=real, max_new_tokens=2, max_denoising_steps=2, num_return_sequences=ROWS // 2, seed=0
    ).sequences
    kernel = ancestor(about, lambda x, t: denoiser.head(denoiser.features(x, alpha(about, t, x))).exp())
    for rows, prompt in zip(out.split(ROWS // 2), ([1, 2], [2]), strict=True):
        alone = rows if len(prompt) == 2 else rows[:, [x.shape[1] - 1 if padding == "left" else 0, 2, 3]]
        given = torch.tensor([True] * len(prompt) + [False] * 2)
        start = noise(about, 2)
        for token in reversed(prompt):
            start = torch.kron(torch.eye(about.states, dtype=torch.float64)[token], start)
        law = composed(start, about, len(prompt) + 2, clamped(kernel, given), uniform_times(2))
        assert agrees(alone, law, about.states)


def test_a_text_depends_on_the_seed_alone() -> None:
    model = wrap(lively(masked(V)), {"max_length": 12})
    one = model.generate(seed=3).sequences
    assert torch.equal(one, model.generate(seed=3).sequences)
    assert torch.equal(one, model.generate(generator=torch.Generator().manual_seed(3)).sequences)
    assert not torch.equal(one, model.generate(seed=4).sequences)
    torch.manual_seed(3)
    other = model.generate(return_dict_in_generate=False)
    torch.manual_seed(3)
    assert torch.equal(other, model.generate().sequences)
    greedy = {"max_denoising_steps": 1, "do_sample": False}
    assert torch.equal(model.generate(**greedy, seed=0).sequences, model.generate(**greedy, seed=1).sequences)


def test_a_streamer_gets_the_prompt_the_drafts_and_the_rest() -> None:
    model = wrap(lively(masked(V)))
    states: list[Any] = []
    x = torch.tensor([[1, 2, V, 0, V]])
    out = model.generate(x, max_denoising_steps=3, streamer=Recorder(states), seed=0).sequences
    assert states[0].tolist() == [[1, 2]]
    assert [len(state[0]) for state in states[1:-1]] == [3] * 4
    assert all(state[0, 1] == 0 for state in states[1:-1])
    assert (torch.cat([states[0], states[-2]], 1) == out).all()
    assert torch.equal(states[-3], states[-2])
    assert states[-1] is None
    taker = Recorder([])
    taker._takes_logits = True  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="takes logits"):
        model.generate(x, streamer=taker)


CONFIG = {"steps": 8, "order": "dilated", "guidance": 0.5, "temperature": 0.8}
PRESETS = [CONFIG, {"steps": 32, "order": "dilated", "temperature": 0.9, "top_p": 0.95}]


@pytest.mark.parametrize(
    "given",
    [{}, {"steps": 9}, {"steps": 30}, {"temperature": 0.5}, {"order": "random"}, {"steps": 64, "order": "dilated"}],
    ids=str,
)
@pytest.mark.parametrize("presets", [{}, {"step_presets": PRESETS}], ids=["one", "presets"])
def test_settings_are_resolved_as_in_the_package(given: dict[str, Any], presets: dict[str, Any]) -> None:
    config = {**CONFIG, **presets}
    expected = resolve(given, masked(V), generation_config=config)
    call = {"max_denoising_steps" if name == "steps" else name: value for name, value in given.items()}
    found = modeling_cdlm.read_settings(transformers.GenerationConfig(**config, do_sample=True), call)
    assert found["max_denoising_steps"] == expected.steps
    for name in ("order", "temperature", "temperature_end", "guidance", "top_k", "top_p", "log_frequency_penalty"):
        assert found[name] == getattr(expected, name), name
    assert preset_for(given, config) == {} or found["order"] == "dilated"


def test_a_generation_config_that_is_given_counts_as_arguments() -> None:
    """What it leaves open comes from the model, special tokens among it."""
    given = transformers.GenerationConfig(max_denoising_steps=3, temperature=0.5, do_sample=True)
    own = transformers.GenerationConfig(**CONFIG, step_presets=PRESETS, eos_token_id=1, do_sample=True)
    found = modeling_cdlm.read_settings(own, {"temperature": 0.7}, given)
    assert (found["max_denoising_steps"], found["temperature"]) == (3, 0.7)
    assert (found["order"], found["guidance"], found["eos_token_id"]) == ("dilated", 0.5, 1)


@pytest.mark.parametrize(
    ("given", "error", "match"),
    [
        ({"num_beams": 4}, TypeError, "does not take num_beams"),
        ({"max_denoising_steps": 0}, ValueError, "max_denoising_steps must be"),
        ({"temperature": 0.0}, ValueError, "above 0 .*do_sample=False"),
        ({"top_p": 1.5}, ValueError, "top_p must be"),
        ({"top_k": -1}, ValueError, "top_k must be"),
        ({"order": "sideways"}, ValueError, "random, dilated, bit-reversed"),
        ({"guidance": -1.0}, ValueError, "guidance must be"),
        ({"posterior": "exact"}, ValueError, "posterior must be"),
        ({"t_max": 1.0}, ValueError, "t_max and t_min belong together"),
        ({"seed": 1, "generator": torch.Generator()}, ValueError, "not both"),
        ({"inputs": torch.tensor([0])}, ValueError, "shape"),
        ({"inputs": "some text"}, ValueError, "tensor of token ids"),
        ({"generation_config": transformers.GenerationConfig(num_beams=4)}, ValueError, "num_beams is not supported"),
        ({"inputs": torch.tensor([[9]])}, ValueError, r"lie in \[0, 4\)"),
        ({"inputs": torch.tensor([[0]]), "input_ids": torch.tensor([[0]])}, ValueError, "not both"),
        ({"inputs": torch.zeros(1, 5, dtype=torch.long)}, ValueError, "leaves no room"),
        ({"inputs": torch.tensor([[0]]), "attention_mask": torch.ones(1, 2)}, ValueError, "attention_mask has"),
    ],
    ids=lambda value: " and ".join(value) if isinstance(value, dict) else str(value),
)
def test_calls_that_make_no_sense_are_refused(given: dict[str, Any], error: type[Exception], match: str) -> None:
    model = wrap(lively(masked(V)), {"max_length": 4})
    with pytest.raises(error, match=match):
        model.generate(**given)


@pytest.mark.parametrize(
    "config",
    [
        {"corrector": "cap"},
        {"timesteps": "cosine"},
        {"final_step": "argmax"},
        {"num_beams": 4},
        {"confidence_threshold": 0.005, "stability_threshold": 1},
        {"sampler_config": {"_cls_name": "EntropyBoundSamplerConfig", "entropy_bound": 0.1}},
        {"repetition_penalty": 1.2},
    ],
    ids=str,
)
@pytest.mark.filterwarnings("default")
def test_a_generation_config_that_asks_for_more_is_refused(config: dict[str, Any]) -> None:
    model = wrap(lively(masked(V)), {"max_length": 4}, **config)
    with pytest.raises(ValueError, match=next(iter(config))):
        model.generate()


def test_models_without_what_is_asked_for_say_so() -> None:
    with pytest.raises(ValueError, match="leave out guidance"):
        wrap(lively(uniform(V)), {"max_length": 4}).generate(guidance=1.0)
    with pytest.raises(ValueError, match="give max_new_tokens"):
        wrap(lively(masked(V))).generate()
    with pytest.raises(ValueError, match="time-conditioned: give timesteps"):
        wrap(lively(uniform(V), time_conditioning=True))(torch.zeros(1, 2, dtype=torch.long))
    with pytest.raises(ValueError, match="embeddings for 4 positions"):
        wrap(lively(masked(V), position_embeddings=4), {"max_length": 4}).generate(max_new_tokens=5)
    with pytest.raises(ValueError, match="AutoModelForCausalLM"):
        CDLMForMaskedLM(CDLMConfig(network={}, process=None))
    with pytest.raises(ValueError, match="AutoModelForMaskedLM"):
        CDLMForCausalLM(CDLMConfig(network={}, process={}))
    with pytest.raises(ValueError, match=r"cdlm\.load\(\.\.\., network=Mine"):
        CDLMForMaskedLM(CDLMConfig(network={"custom": "Mine"}, process={}))
    with pytest.raises(ValueError, match="version 1"):
        CDLMConfig(version=1)


EOS = 0


@pytest.mark.parametrize("padded", [True, False])
def test_texts_end_where_those_of_the_package_end(padded: bool) -> None:
    """With an EOS token in the middle, or a word behind the end."""
    text = {"max_length": 8, "eos_padded": padded}
    model = wrap(lively(masked(V)), text, eos_token_id=EOS, bos_token_id=EOS, pad_token_id=2)
    prompt = torch.tensor([[1, 1]])
    out = model.generate(prompt, num_return_sequences=300, max_denoising_steps=4, seed=0)
    plain = wrap(lively(masked(V)), text).generate(prompt, num_return_sequences=300, max_denoising_steps=4, seed=0)
    template = Template([1, 1] + [OPEN] * 6, ["", ""], [(2, 8)])
    ended = 0
    for found, ids, rate, per in zip(
        out.sequences.tolist(),
        plain.sequences.tolist(),
        out.tokens_per_forward,
        plain.tokens_per_forward,
        strict=True,
    ):
        expected = (without_padding if padded else until_eos)(ids, template, EOS)
        if padded:  # which leaves out EOS tokens within the text, too
            end = max(k for k in range(2, 9) if [i for i in ids[2:k] if i != EOS] == expected[2:] and cut(ids, k))
            assert found == ids[:end] + [2] * (8 - end)
            assert float(rate) == pytest.approx(float(per) * (end - 2) / 6)
        else:
            assert found == (expected + [EOS] + [2] * 8)[:8] or found == expected == ids
        ended += found != ids
    assert ended > 100


def cut(ids: list[int], end: int) -> bool:
    """Whether no other end has fewer words behind it and EOS tokens before it; the last such end."""
    errors = [ids[2:k].count(EOS) + sum(i != EOS for i in ids[k:]) for k in range(2, 9)]
    return errors[end - 2] == min(errors) and min(errors) not in errors[end - 1 :]


def test_framed_and_padded_models_see_what_they_saw_in_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """BOS before a prompt unless it is there, and EOS behind an infilled text, neither of which is in the result."""
    text = {"max_length": 8, "eos_padded": True, "bos_framed": True}
    model = wrap(lively(masked(V)), text, eos_token_id=EOS, bos_token_id=EOS, pad_token_id=EOS)
    seen: list[list[list[int]]] = []
    hidden = CDLMForMaskedLM._hidden

    def watch(self: Any, x: Tensor, t: Any, attention_mask: Tensor | None = None) -> Tensor:
        assert attention_mask is not None
        seen.append([row[real].tolist() for row, real in zip(x, attention_mask.bool(), strict=True)])
        return hidden(self, x, t, attention_mask)

    monkeypatch.setattr(CDLMForMaskedLM, "_hidden", watch)
    out = model.generate(torch.tensor([[2, V, 1]]), max_denoising_steps=1, num_return_sequences=40, seed=0).sequences
    assert seen.pop() == [[EOS, 2, V, 1, *[EOS] * 4]] * 40
    assert out.shape == (40, 3)
    assert EOS not in out  # a span within a text does not end it
    out = model.generate(torch.tensor([[EOS, 2], [1, 2]]), max_denoising_steps=1, seed=0).sequences
    assert seen.pop() == [[EOS, 2, *[V] * 5], [EOS, 1, 2, *[V] * 5]]
    assert out[:, :2].tolist() == [[EOS, 2], [1, 2]]
    model.generate(max_denoising_steps=1, seed=0)
    assert seen.pop() == [[V] * 8]
    mixed = torch.tensor([[2, 2, V, 1], [2, 1, V, 1]])
    real = torch.tensor([[0, 1, 1, 1], [1, 1, 1, 1]])
    model.generate(mixed, attention_mask=real, max_denoising_steps=1, seed=0)
    assert seen.pop() == [[EOS, 2, V, 1, *[EOS] * 4], [EOS, 2, 1, V, 1, *[EOS] * 3]]


def test_unused_outputs_are_never_drawn(tmp_path: Path) -> None:
    """A network may have more outputs than there are tokens: the directory says which."""
    folder = write_model(tmp_path / "model", "masked", BPE, vocab=BPE.vocab_size + 5, length=16)
    out = cdlm.load(folder, "cpu").save_pretrained(tmp_path / "copy")
    fields = json.loads((out / "generation_config.json").read_text())
    assert fields["suppress_tokens"] == list(range(BPE.vocab_size, BPE.vocab_size + 5))
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(out)
    assert tokenizer.mask_token_id == BPE.vocab_size + 5
    assert tokenizer(f"the {tokenizer.mask_token}").input_ids[-1] == BPE.vocab_size + 5
    model = wrap(lively(masked(V)), {"max_length": 64}, suppress_tokens=[1])
    assert 1 not in model.generate(seed=0).sequences


@pytest.mark.parametrize("words", ["bytes", "bpe", "spelled", "gpt2"])
def test_the_tokenizer_has_our_ids(words: str, tmp_path: Path) -> None:
    given = {"bytes": cdlm.data.tokenizer.Tokenizer.load("bytes"), "bpe": BPE, "gpt2": BPE, "spelled": spelled("abcde")}
    folder = write_model(tmp_path / "model", "masked", given[words], length=16)
    if words == "gpt2":
        given["bpe"].model.model.save(str(folder))
        (folder / "tokenizer.json").unlink()
    pipe = cdlm.load(folder, "cpu")
    out = pipe.save_pretrained(tmp_path / "copy")
    again = cdlm.load(out, "cpu").tokenizer
    assert (again.kind, again.vocab_size, again.eos, again.bos) == (
        pipe.tokenizer.kind, pipe.tokenizer.vocab_size, pipe.tokenizer.eos, pipe.tokenizer.bos,
    )  # fmt: skip
    kind = transformers.GPT2Tokenizer if words == "gpt2" else transformers.PreTrainedTokenizerFast
    theirs = kind.from_pretrained(out)
    assert (theirs.eos_token_id, theirs.bos_token_id, theirs.mask_token_id) == (
        again.eos,
        again.bos,
        pipe.mask_token_id,
    )
    texts = ["abcde", "ab"] if words == "spelled" else ["the cat sat on the mat.", "Über naïve café\n\n東京 😀  the"]
    for text in texts:
        ids = again.encode(text)
        assert theirs(text).input_ids == ids
        if words != "spelled":
            assert theirs.decode(ids) == text
    batch = theirs(texts, padding=True)
    assert batch.attention_mask[1][0] == (len(again.encode(texts[1])) >= len(again.encode(texts[0])))


@pytest.mark.parametrize("name", [*zoo.names(), *zoo.sudoku_names().values()])
def test_the_models_of_the_package_have_what_a_saved_one_has(name: str, tmp_path: Path) -> None:
    out = cdlm.load(name, "cpu").save_pretrained(tmp_path / name)
    for file in ("modeling_cdlm.py", "tokenizer_config.json", "generation_config.json", "tokenizer.json"):
        assert (zoo.HERE / name / file).read_text() == (out / file).read_text(), file
    config = transformers.GenerationConfig.from_pretrained(zoo.HERE / name)
    temperature = None if name in zoo.sudoku_names().values() else 0.7
    assert (config.max_denoising_steps, config.do_sample, config.temperature) == (8, True, temperature)


def test_fields_have_the_meaning_that_transformers_gives_them() -> None:
    """None of our settings has the name of a field of transformers, but those that mean the same."""
    from transformers.models.diffusion_gemma import DiffusionGemmaGenerationConfig

    theirs = {*vars(transformers.GenerationConfig()), *vars(DiffusionGemmaGenerationConfig())}
    written = {"max_denoising_steps" if name == "steps" else name for name in cdlm.sample.settings.SPECS}
    assert written & theirs == {"max_denoising_steps", "temperature", "top_k", "top_p"}
    read = set(modeling_cdlm.DEFAULTS) - theirs
    ours = {"frequency_penalty", "presence_penalty", "log_frequency_penalty"}
    assert read == {"order", "guidance", "posterior", "temperature_end"} | ours


WITHOUT = """
    import importlib.abc, sys

    class Blocker(importlib.abc.MetaPathFinder):
        def find_spec(self, name, path, target=None):
            if name.partition(".")[0] == "cdlm":
                raise ModuleNotFoundError("cdlm is not there")

    sys.meta_path.insert(0, Blocker())
    try:
        import cdlm
    except ModuleNotFoundError:
        pass
    else:
        sys.exit("cdlm is there")

    import json, torch, transformers
    from pathlib import Path
    from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, AutoTokenizer, GenerationConfig, pipeline

    found = {}
    for folder in sorted(Path("models").iterdir()):
        kind = AutoModelForCausalLM if folder.name == "causal" else AutoModelForMaskedLM
        model = kind.from_pretrained(folder, trust_remote_code=True, dtype=torch.float32)
        x = torch.load(f"{folder.name}.pt")
        more = {} if folder.name == "causal" else {"timesteps": 0.5}
        logits = model(input_ids=x, **more).logits
        model.save_pretrained(f"saved-{folder.name}")
        again = kind.from_pretrained(f"saved-{folder.name}", trust_remote_code=True)
        assert torch.equal(again(input_ids=x, **more).logits, logits)
        assert again.generation_config.to_dict() == model.generation_config.to_dict()
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
        prompt = tokenizer(["the cat", "a"], return_tensors="pt", padding=True)
        if folder.name == "causal":
            out = model.generate(**prompt, max_new_tokens=4, do_sample=True)
        else:
            out = model.generate(**prompt, max_new_tokens=4, max_denoising_steps=2, seed=0).sequences
            model.to(torch.bfloat16).generate(**prompt, max_new_tokens=4, max_denoising_steps=2, seed=0)
            assert model.prior.dtype == torch.float64 or model.prior.dtype == torch.bfloat16
            model.float()
        assert out.shape == (2, prompt.input_ids.shape[1] + 4)
        if folder.name == "masked":
            fill = pipeline("fill-mask", model=model, tokenizer=tokenizer)
            best = fill("the [MASK] sat")[0]
            law = model(**tokenizer("the [MASK] sat", return_tensors="pt")).logits[0, 1].exp()
            assert abs(float(law.max()) - best["score"]) < 1e-5 and int(law.argmax()) == best["token"]
            streamer = transformers.TextDiffusionStreamer(tokenizer)
            model.generate(**tokenizer("the cat", return_tensors="pt"), streamer=streamer, max_new_tokens=4, seed=0)
            assert GenerationConfig.from_pretrained(folder).max_denoising_steps == 5
        torch.save(logits, f"{folder.name}-logits.pt")
    assert not [name for name in sys.modules if name.partition(".")[0] == "cdlm"]
    print("all is well")
"""


def run_without_cdlm(code: str, folder: Path, python: str = sys.executable) -> str:
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    env |= {"HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "home"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [python, "-c", textwrap.dedent(code)], cwd=folder, env=env, capture_output=True, text=True, timeout=300,
        stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def test_directories_work_without_the_package(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    pipes = {}
    for kind in ("masked", "uniform", "causal"):
        source = write_model(tmp_path / "from" / kind, kind, BPE, length=16)
        if kind == "masked":
            (source / "generation_config.json").write_text(json.dumps({"max_denoising_steps": 5, "order": "dilated"}))
        pipes[kind] = cdlm.load(source, "cpu")
        pipes[kind].save_pretrained(tmp_path / "models" / kind)
        states = BPE.vocab_size + (kind == "masked")
        x = torch.randint(0, states, (2, 8), generator=torch.Generator().manual_seed(0))
        torch.save(x, tmp_path / f"{kind}.pt")
    assert "all is well" in run_without_cdlm(WITHOUT, tmp_path)
    for kind, pipe in pipes.items():
        logits, x = torch.load(tmp_path / f"{kind}-logits.pt"), torch.load(tmp_path / f"{kind}.pt")
        assert same(logits.log_softmax(-1), pipe.denoiser(x, 0.5))
        saved = cdlm.load(
            tmp_path / f"saved-{kind}", "cpu", tokenizer=tmp_path / "models" / kind
        )  # what transformers writes, the package reads
        assert same(saved.denoiser(x, 0.5), pipe.denoiser(x, 0.5))
        assert saved.generation_config == pipe.generation_config
