"""diffusers: our samplers as one of its schedulers, and a pipeline that runs our models under its schedulers.

    scheduler = CDLMScheduler(order="dilated")
    LLaDA2Pipeline(model=model, scheduler=scheduler, tokenizer=tokenizer)(prompt, num_inference_steps=8)

    pipe = CDLMPipeline.from_pretrained("mdlm")
    pipe.scheduler = BlockRefinementScheduler()
    pipe("Once upon a time", gen_length=32, num_inference_steps=8)

A scheduler of diffusers is called step by step with the logits of one block, so it must keep state between steps, which
nothing else in this package does: `CDLMScheduler` draws the plan of a block at its first step and holds it until the
block is done. Its noise is a function of one integer per block, which comes from the `generator`.
"""

import dataclasses
import inspect
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from cdlm.extras import install

try:
    import diffusers
except ImportError:
    raise ImportError(f"cdlm.interop.diffusers needs diffusers; run in the checkout: {install('diffusers')}") from None

from diffusers import BlockRefinementScheduler, ConfigMixin, DiffusionPipeline, DiscreteDDIMScheduler, SchedulerMixin
from diffusers.configuration_utils import register_to_config
from diffusers.schedulers.scheduling_block_refinement import BlockRefinementSchedulerOutput
from diffusers.utils import BaseOutput

from cdlm.process import Process, masked
from cdlm.process.order import equal_steps
from cdlm.rng import Rng, seeded
from cdlm.sample.confidence import CERTAINTIES, most_certain
from cdlm.sample.draw import Draw, unconditional_log_probs
from cdlm.sample.logits import LogitsRows, ban, guide, logits_processors
from cdlm.sample.order import step_of_level
from cdlm.sample.samplers import ORDERS, load_function
from cdlm.sample.settings import Settings, resolve
from cdlm.sample.timesteps import Times, timesteps
from cdlm.text.completion import batches
from cdlm.text.pipeline import Pipeline, load
from cdlm.text.template import OPEN, Template, has_blanks, repeat
from cdlm.types import Tokens, wide

_PROCESS = masked(1)
"""The schedule that timesteps refer to: a scheduler is not told how the model was trained."""
_SCHEDULER_CONFIG = Path("scheduler") / "scheduler_config.json"
"""In the directory of a saved pipeline."""


@dataclasses.dataclass(frozen=True)
class BlockPlan:
    """The noise of a block, and when its positions are unmasked."""

    rng: Rng
    times: Times
    num_masks: Int[Tensor, "b"]
    """At the first step."""
    step: Int[Tensor, "b l"] | None
    """When each position is unmasked; None for orders that ask the network."""


class CDLMScheduler(SchedulerMixin, ConfigMixin):
    """Our samplers for masked models, as a scheduler for `LLaDA2Pipeline` and `CDLMPipeline`.

    `order`, `step_size`, `timesteps`, `temperature_end` and `entropy_bound` are the settings of that name
    (docs/sampling.md); temperature, top-k and top-p are arguments of the pipeline. Within a block it draws from the
    distribution of the sampler that these settings name, with every block as a sequence of its own. The mask is never
    drawn, whatever its logit. `threshold`, `editing_threshold` and `minimal_topk`, which `LLaDA2Pipeline` passes to any
    scheduler, belong to `BlockRefinementScheduler` and do not apply: tokens that are visible stay.

    Guidance needs the unconditional prediction of the model, which a scheduler does not see: `CDLMPipeline` has it.
    """

    order = 1

    @register_to_config  # type: ignore[untyped-decorator]
    def __init__(
        self,
        block_length: int = 32,
        num_inference_steps: int = 32,
        order: str = "random",
        step_size: str = "random",
        timesteps: str = "uniform",
        temperature_end: float | None = None,
        entropy_bound: float | None = None,
        guidance: float = 0.0,
    ) -> None:
        if guidance:
            raise ValueError(
                f"guidance needs the unconditional prediction of the model, which a scheduler does not see (got "
                f"guidance={guidance}); use CDLMPipeline with guidance_scale={1 + guidance:g}."
            )
        self.set_timesteps(num_inference_steps, block_length=block_length)
        self._settings(1.0, 0, 1.0)

    check_eos_finished = BlockRefinementScheduler.check_eos_finished
    check_block_should_continue = BlockRefinementScheduler.check_block_should_continue

    def set_timesteps(
        self, num_inference_steps: int, device: torch.device | str | None = None, block_length: int | None = None
    ) -> None:
        """Begin anew, with this many steps in each block. Blocks may have any length."""
        if num_inference_steps < 1:
            raise ValueError(f"num_inference_steps must be at least 1 (got {num_inference_steps}).")
        if block_length is not None and block_length < 1:
            raise ValueError(f"block_length must be at least 1 (got {block_length}).")
        self.num_inference_steps = num_inference_steps
        self.timesteps = torch.arange(num_inference_steps - 1, -1, -1, device=device)
        self._plan: BlockPlan | None = None

    @torch.no_grad()
    def step(
        self,
        model_output: Float[Tensor, "b l v"],
        timestep: int | Tensor,
        sample: Tokens,
        *,
        mask_token_id: int | None = None,
        temperature: float = 1.0,
        top_p: float | None = None,
        top_k: int | None = None,
        sampling_method: str = "auto",
        threshold: float | None = None,
        editing_threshold: float | None = None,
        minimal_topk: int | None = None,
        prompt_mask: Bool[Tensor, "l"] | None = None,
        generator: torch.Generator | None = None,
        return_dict: bool = True,
    ) -> BlockRefinementSchedulerOutput | tuple[Any, ...]:
        """Step number `timestep` of a block, counted from 0: draw the tokens of the positions whose turn it is.

        A temperature of 0, or the `sampling_method` greedy, takes the most probable token. `sampled_probs` are the
        probabilities of the drawn tokens under the model itself, and 0 where nothing was drawn.
        """
        if mask_token_id is None:
            raise ValueError("CDLMScheduler unmasks positions: it needs mask_token_id, and a masked model.")
        step, greedy = int(timestep), temperature == 0 or sampling_method == "greedy"
        settings = self._settings(1.0 if greedy else temperature, top_k or 0, 1.0 if top_p is None else top_p)
        is_mask = sample == mask_token_id
        if prompt_mask is not None:
            is_mask &= ~prompt_mask.to(is_mask.device)
        if step == 0 or self._plan is None or self._plan.num_masks.shape != is_mask.shape[:1]:
            self._plan = _block_plan(is_mask, settings, generator)
        plan = self._plan

        banned = (mask_token_id,) if mask_token_id < model_output.shape[-1] else ()
        draw = Draw(logits_processors(settings, banned=banned), precision=settings.precision)
        candidates = is_mask if plan.step is None else is_mask & self._turn(plan.step, step).to(is_mask.device)
        index = candidates.flatten().nonzero()[:, 0]
        times = torch.full((len(index),), float(plan.times[step]), dtype=wide(sample.device), device=sample.device)
        raw = model_output.flatten(0, 1)[index]
        logits = draw.process(raw, LogitsRows(times, sample, index))
        noise = plan.rng("data") if plan.step is not None else plan.rng("hop", step)
        u = noise.uniform(sample.shape[1], sample.device).flatten()[index]
        token = logits.argmax(-1) if greedy else draw.token(logits, u)
        log_probs = raw.to(wide(sample.device)).log_softmax(-1)
        transfer = candidates
        if plan.step is None:
            certainty = torch.full(sample.shape, -torch.inf, dtype=log_probs.dtype, device=sample.device)
            certainty.view(-1)[index] = CERTAINTIES[settings.order](log_probs, token)
            transfer = is_mask & self._most_certain(certainty, plan, is_mask, step, settings)

        sampled = sample.flatten().scatter(0, index, token).view_as(sample)
        probs = torch.zeros(sample.shape, dtype=torch.float32, device=sample.device)
        probs.view(-1)[index] = log_probs.gather(-1, token[:, None])[:, 0].exp().float()
        edited = torch.zeros_like(transfer)
        output = BlockRefinementSchedulerOutput(
            torch.where(transfer, sampled, sample), transfer, edited, sampled, probs, model_output
        )
        return output if return_dict else output.to_tuple()

    def _settings(self, temperature: float, top_k: int, top_p: float) -> Settings:
        """The settings of a step, complete and checked."""
        names = ("order", "step_size", "timesteps", "temperature_end", "entropy_bound")
        given = {name: getattr(self.config, name) for name in names}
        given |= {"steps": self.num_inference_steps, "temperature": temperature, "top_k": top_k, "top_p": top_p}
        settings = resolve({name: value for name, value in given.items() if value is not None}, _PROCESS)
        if settings.order == "first-hitting":
            raise ValueError("the order first-hitting has no fixed number of steps; use cdlm.load(...).sample.")
        return settings

    def _turn(self, steps: Int[Tensor, "b l"], step: int) -> Bool[Tensor, "b l"]:
        """The positions of a step; the last one takes all that is left."""
        return steps >= step if step == self.num_inference_steps - 1 else steps == step

    def _most_certain(
        self,
        certainty: Float[Tensor, "b l"],
        plan: BlockPlan,
        is_mask: Bool[Tensor, "b l"],
        step: int,
        settings: Settings,
    ) -> Bool[Tensor, "b l"]:
        """As many as the timesteps say, the most certain ones first; and those that an entropy bound adds."""
        masks = 1 - _PROCESS.noise.alpha(plan.times)
        share = float(masks[step + 1] / masks[0])
        stay = (plan.num_masks.to(torch.float64) * share + 1e-9).floor().long()
        keep = (is_mask.sum(-1).cpu() - stay).clamp(min=0).to(certainty.device)
        tie = plan.rng("tie", step).uniform(certainty.shape[1], certainty.device)
        return most_certain(certainty, tie, keep, settings.entropy_bound if settings.order == "entropy-bound" else None)


def _block_plan(is_mask: Bool[Tensor, "b l"], settings: Settings, generator: torch.Generator | None) -> BlockPlan:
    """The plan of a block, by one integer of the generator."""
    device = generator.device if generator is not None else torch.device("cpu")
    seed = int(torch.randint(2**62, (1,), generator=generator, device=device))
    rng, times = seeded(seed, batch=len(is_mask)), timesteps(settings)
    is_mask = is_mask.cpu()
    step = None
    if settings.order in ORDERS:
        level = load_function(ORDERS[settings.order].levels)(is_mask, len(times) - 1, rng)
        level = equal_steps(level, is_mask) if settings.step_size == "equal" else level
        step = step_of_level(_PROCESS, level, times)
    return BlockPlan(rng, times, is_mask.sum(-1), step)


@dataclasses.dataclass
class CDLMPipelineOutput(BaseOutput):
    """What `CDLMPipeline` returns: `sequences` are the generated tokens, without the prompt if that comes first."""

    sequences: list[list[int]]
    texts: list[str] | None
    """Whole texts, with the prompt; None for the output_type "seq"."""
    nfe: int
    """Network evaluations for each sequence; without the unconditional one of guidance."""


class CDLMPipeline(DiffusionPipeline):
    """A model of this package under a discrete scheduler of diffusers, or under `CDLMScheduler`.

    Masked models take `BlockRefinementScheduler` and `CDLMScheduler`; uniform models `DiscreteDDIMScheduler`,
    `EntropyBoundScheduler` and `BlockRefinementScheduler`. Any scheduler with their interface works, of your own too.
    """

    def __init__(self, model: Pipeline, scheduler: Any) -> None:
        super().__init__()
        if model.denoiser.process is None:
            raise ValueError(
                f"{model.name} is autoregressive, and has no use for a scheduler; use cdlm.load(...).sample."
            )
        self.register_modules(denoiser=model.denoiser, scheduler=scheduler)
        self.model = model

    @classmethod
    def from_pretrained(cls, source: str | Path | None = None, scheduler: Any = None, **options: Any) -> "CDLMPipeline":
        """Open what `cdlm.load` opens, with its options.

        The scheduler is the one given, the one that was saved with the model, or the default: `CDLMScheduler` with the
        order of the model's generation config, for uniform models `DiscreteDDIMScheduler`.
        """
        model = load(source, **options)
        if scheduler is None and model.directory is not None and (model.directory / _SCHEDULER_CONFIG).is_file():
            scheduler = _saved_scheduler(model.directory)
        if scheduler is None and model.denoiser.process is not None:
            scheduler = _default_scheduler(model)
        return cls(model, scheduler)

    def save_pretrained(self, directory: str | Path, **options: Any) -> None:
        """Write the model as `Pipeline.save_pretrained` does, with the scheduler beside it."""
        self.model.save_pretrained(directory, **options)
        self.scheduler.save_pretrained(Path(directory) / _SCHEDULER_CONFIG.parent)

    @torch.no_grad()
    def __call__(
        self,
        prompt: str | Sequence[str] = "",
        gen_length: int | None = None,
        block_length: int | None = None,
        num_inference_steps: int | None = None,
        temperature: float | None = None,
        top_p: float | None = None,
        top_k: int | None = None,
        guidance_scale: float | None = None,
        num_samples: int = 1,
        span_length: int = 4,
        batch_size: int = 32,
        generator: torch.Generator | None = None,
        output_type: str = "text",
        return_dict: bool = True,
        callback_on_step_end: Callable[[Any, int, int, dict[str, Tensor]], dict[str, Tensor]] | None = None,
    ) -> CDLMPipelineOutput | tuple[Any, ...]:
        """Continue prompts by `gen_length` tokens (up to the model's length unless given), or fill their blanks.

        `num_inference_steps` is per block; a sequence is one block unless `block_length` says otherwise, which only
        masked models can. `guidance_scale` is 1 + guidance, and 1 turns it off. What is not given comes from the
        generation config of the model; each scheduler takes the arguments that its `step` has. The callback gets
        `block_x`, the tokens of the batch, after each step, and may return others.
        """
        if output_type not in ("text", "seq"):
            raise ValueError(f'output_type must be "text" or "seq" (got {output_type!r}).')
        if guidance_scale is not None and guidance_scale < 1:
            raise ValueError(f"guidance_scale must be at least 1 (got {guidance_scale}).")
        guidance = None if guidance_scale is None else guidance_scale - 1
        given = {"steps": num_inference_steps, "top_p": top_p, "top_k": top_k, "guidance": guidance}
        given |= {"temperature": temperature or None}
        settings = self.model.resolve(given)
        if guidance is not None:  # a scale is constant, whatever the generation config says
            settings = dataclasses.replace(settings, guidance_end=None)
        self._check(block_length)
        prompts = [prompt] if isinstance(prompt, str) else list(prompt)
        templates = repeat([self._template(text, gen_length, span_length) for text in prompts], num_samples)
        self.model.check(templates, settings)

        token_ids: list[list[int]] = [[] for _ in templates]
        nfe = 0
        for rows in batches(templates, batch_size, causal=False):
            x, passes = self._denoise(
                [templates[row] for row in rows],
                settings,
                settings.temperature if temperature is None else temperature,
                block_length,
                generator,
                callback_on_step_end,
            )
            nfe = max(nfe, passes)
            for row, ids in zip(rows, x.tolist(), strict=True):
                token_ids[row] = self.model.finished(ids, templates[row]) if self.model.eos_padded else ids
        pairs = list(zip(templates, token_ids, strict=True))
        texts = [template.text(ids, self.model.decode) for template, ids in pairs] if output_type == "text" else None
        sequences = [ids[template.spans[0][0] :] if template.is_continuation else ids for template, ids in pairs]
        output = CDLMPipelineOutput(sequences, texts, nfe)
        return output if return_dict else output.to_tuple()

    def _check(self, block_length: int | None) -> None:
        """Refuse schedulers that do not fit the process of the model."""
        process, name = self.denoiser.process, type(self.scheduler).__name__
        parameters = inspect.signature(self.scheduler.step).parameters
        if process.absorbing and "mask_token_id" not in parameters:
            raise ValueError(
                f"{name} is for uniform models, and {self.model.name} is masked; use CDLMScheduler or "
                "BlockRefinementScheduler."
            )
        if not process.absorbing and (not process.flat or isinstance(self.scheduler, CDLMScheduler)):
            raise ValueError(
                f"{name} does not fit {self.model.name}, whose process is {process.name}; "
                + ("use DiscreteDDIMScheduler." if process.flat else "use cdlm.load(...).sample.")
            )
        if block_length is not None and block_length < 1:
            raise ValueError(f"block_length must be at least 1 (got {block_length}).")
        if block_length is not None and not process.absorbing:
            raise ValueError("a uniform model denoises a whole sequence at one noise level; leave out block_length.")

    def _template(self, text: str, gen_length: int | None, span_length: int) -> Template:
        """A prompt with blanks to be filled, or with `gen_length` tokens to be generated behind it."""
        if has_blanks(text):
            return self.model.infillings([text], 1, span_length)[0]
        (template,) = self.model.continuations([text])
        if gen_length is None:
            return template
        if gen_length < 1:
            raise ValueError(f"gen_length must be at least 1 (got {gen_length}).")
        num_given = len(template.token_ids) - template.num_generated
        return self.model.continuations([text], 1, num_given + gen_length)[0]

    def _denoise(
        self,
        templates: Sequence[Template],
        settings: Settings,
        temperature: float,
        block_length: int | None,
        generator: torch.Generator | None,
        callback: Callable[[Any, int, int, dict[str, Tensor]], dict[str, Tensor]] | None,
    ) -> tuple[Tokens, int]:
        """The finished tokens of sequences of one length, and the network evaluations that they took."""
        denoiser, scheduler, steps = self.denoiser, self.scheduler, int(settings.steps or 1)
        process, device = denoiser.process, denoiser.device
        ids = torch.tensor([template.token_ids for template in templates], device=device)
        is_given = ids != OPEN
        x = torch.where(is_given, ids, _noise(process, ids, generator))
        banned = (*templates[0].banned, *range(self.model.tokenizer.vocab_size, denoiser.vocab))
        guidance = settings.guidance
        guidance_end = guidance if settings.guidance_end is None else settings.guidance_end
        guided = guidance or guidance_end
        unconditional = unconditional_log_probs(denoiser, process, x) if guided else None

        def logits(t: float) -> Float[Tensor, "b l v"]:
            found = shaped = denoiser(x, t)
            if unconditional is not None:
                strength = guidance_end + (guidance - guidance_end) * t
                shaped = guide(shaped, _NO_ROWS, guidance=strength, unconditional=unconditional)
            if banned:
                shaped = ban(shaped, _NO_ROWS, tokens=banned)
            return torch.where(process.positions(x)[..., None], shaped, found)

        values = {
            "mask_token_id": process.vocab if process.absorbing else None,
            "temperature": temperature,
            "top_p": settings.top_p,
            "top_k": settings.top_k or None,
            "generator": generator,
        }
        accepted = inspect.signature(scheduler.step).parameters
        values = {name: value for name, value in values.items() if name in accepted}
        corrector_steps = getattr(scheduler.config, "corrector_steps", 0)
        corrected = (steps - 1) // (1 + corrector_steps) if corrector_steps else 0
        steps -= corrected * corrector_steps  # the budget includes the passes of the corrector, as in diffusers

        nfe = 0
        for first in range(0, x.shape[1], block_length or x.shape[1]):
            block = slice(first, first + (block_length or x.shape[1]))
            if bool(is_given[:, block].all()):
                continue
            self._set_timesteps(steps, x[:, block].shape[1])
            for k in range(steps):
                output = scheduler.step(
                    model_output=logits(self._time(k, steps))[:, block], timestep=k, sample=x[:, block], **values
                )
                new = output.prev_sample
                if k == steps - 1 and hasattr(output, "accepted_index"):
                    new = output.sampled_tokens  # EntropyBoundScheduler leaves noise where it accepts nothing
                nfe += 1
                x = torch.where(is_given, ids, _replaced(x, block, new))
                for _ in range(corrector_steps if k < corrected else 0):
                    output = scheduler.step_correct(
                        model_output=logits(self._time(k + 1, steps))[:, block],
                        timestep=k,
                        sample=x[:, block],
                        generator=generator,
                    )
                    nfe += 1
                    x = torch.where(is_given, ids, _replaced(x, block, output.prev_sample))
                if callback is not None:
                    x = callback(self, nfe - 1, k, {"block_x": x}).get("block_x", x)
                if process.absorbing and not bool((x[:, block] == process.vocab).any()):
                    break
        return x, nfe

    def _set_timesteps(self, steps: int, block_length: int) -> None:
        accepted = inspect.signature(self.scheduler.set_timesteps).parameters
        block = {"block_length": block_length} if "block_length" in accepted else {}
        self.scheduler.set_timesteps(steps, device=self.denoiser.device, **block)

    def _time(self, k: int, steps: int) -> float:
        """The time before step k: schedulers of diffusers have alpha = k / steps there."""
        plan = getattr(self.scheduler, "_plan", None)
        if k and isinstance(plan, BlockPlan):
            return float(plan.times[k])
        alpha = torch.tensor(k / steps, dtype=torch.float64)
        return float(self.denoiser.process.noise.inverse(alpha).clamp(0, 1))


_NO_ROWS = LogitsRows(torch.empty(0), torch.empty(0, 0, dtype=torch.long), torch.empty(0, dtype=torch.long))
"""For processors that look at logits alone."""


def _replaced(x: Tokens, block: slice, new: Tokens) -> Tokens:
    x = x.clone()
    x[:, block] = new
    return x


def _noise(process: Process, like: Tokens, generator: torch.Generator | None) -> Tokens:
    """Draws from the prior at every position; masks, if it is masked."""
    if process.absorbing:
        return torch.full_like(like, process.vocab)
    device = generator.device if generator is not None else torch.device("cpu")
    drawn = torch.multinomial(process.prior.to(device), like.numel(), replacement=True, generator=generator)
    return drawn.view_as(like).to(like.device)


def _default_scheduler(model: Pipeline) -> Any:
    process = model.denoiser.process
    if process is not None and not process.absorbing:
        return DiscreteDDIMScheduler()
    settings = model.resolve({})
    names = ("order", "step_size", "timesteps", "temperature_end")
    return CDLMScheduler(**{name: getattr(settings, name) for name in names})


def _saved_scheduler(directory: Path) -> Any:
    """The scheduler that was saved with a model: `CDLMScheduler`, or one of diffusers."""
    name = json.loads((directory / _SCHEDULER_CONFIG).read_text()).get("_class_name")
    known: Any = CDLMScheduler if name == CDLMScheduler.__name__ else getattr(diffusers, str(name), None)
    is_scheduler = inspect.isclass(known) and issubclass(known, SchedulerMixin)
    if not is_scheduler:
        raise ValueError(f"{directory / _SCHEDULER_CONFIG} names {name!r}, which is no scheduler of diffusers.")
    return known.from_pretrained(directory / _SCHEDULER_CONFIG.parent)
