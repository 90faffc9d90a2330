"""CDLM models for transformers: configuration, network and sampler in one file that needs nothing else.

    model = AutoModelForMaskedLM.from_pretrained(DIRECTORY, trust_remote_code=True)
    tokenizer = AutoTokenizer.from_pretrained(DIRECTORY)
    output = model.generate(**tokenizer("Once upon a time", return_tensors="pt"), max_denoising_steps=16, seed=0)
    print(tokenizer.decode(output.sequences[0], skip_special_tokens=True))

Exported model directories have a copy of this file, which is why it imports nothing of the package cdlm and repeats its
network (`cdlm/model/dit.py`) and its sampler. The package has more samplers, and faster ones: `cdlm.load(DIRECTORY)`.
"""

import dataclasses
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GenerationConfig, GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput, MaskedLMOutput
from transformers.utils.generic import ModelOutput

_FORMAT = 2
_UNUSED_ARGUMENTS = ("output_attentions", "output_hidden_states", "num_items_in_batch", "use_cache", "past_key_values")
"""What transformers passes to any model, and this one has no use for."""
_MAX_ENTRIES = 2**26
"""Logits at a time: those of all positions at once may not fit in memory."""

_SAMPLER: dict[str, Any] = {
    "max_denoising_steps": 32,
    "order": "random",
    "temperature": 1.0,
    "top_k": 0,
    "top_p": 1.0,
    "guidance": 0.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "log_frequency_penalty": 0.0,
    "posterior": "auto",
    "temperature_end": None,
    "t_max": None,
    "t_min": None,
}
DEFAULTS: dict[str, Any] = {
    **_SAMPLER,
    "do_sample": True,
    "max_new_tokens": None,
    "max_length": None,
    "num_return_sequences": 1,
    "return_dict_in_generate": True,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "suppress_tokens": None,
}
"""What `generate` reads, and what holds where neither the call nor generation_config.json gives a value."""
ORDERS = ("random", "dilated", "bit-reversed")
_PACKAGE_ONLY = {
    "sampler": ("auto", "ancestral", "plain"),
    "timesteps": ("uniform",),
    "step_size": ("random",),
    "final_step": ("none",),
    "corrector": ("none",),
    "precision": ("fp64", "fp32"),
    "block_length": (0,),
}
"""Settings of the samplers of the package cdlm, and the values that mean no more than what this file does."""
_DIFFUSION_ONLY = ("sampler_config", "stability_threshold", "confidence_threshold")
"""Fields of other diffusion models in transformers."""
_SAMPLER_FIELDS = (*_SAMPLER, *_PACKAGE_ONLY, "eta", "entropy_bound")
"""The fields that belong to one sampler: a preset replaces all of them."""


class CDLMConfig(PretrainedConfig):
    """The config.json of a model directory."""

    model_type = "cdlm"

    def __init__(
        self,
        vocab_size: int = 256,
        network: dict[str, Any] | None = None,
        process: dict[str, Any] | None = None,
        version: int = _FORMAT,
        **kwargs: Any,
    ) -> None:
        if version != _FORMAT:
            raise ValueError(
                f"config.json has version {version}, and this file reads {_FORMAT}; open it with cdlm.load"
            )
        self.vocab_size = vocab_size
        self.network = network or {}
        self.process = process
        self.version = version
        super().__init__(**kwargs)


# The network, with the tensor names of the public checkpoints of MDLM and DUO. Shapes: b sequences of l positions,
# d the hidden size, c the width of the noise-level embedding, h heads of width e.


class LayerNorm(nn.Module):
    """Layer norm in fp32 or wider, with a learned scale and no shift."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        dtype = torch.promote_types(x.dtype, torch.float32)
        return (F.layer_norm(x.to(dtype), x.shape[-1:]) * self.weight).to(x.dtype)


class Embedding(nn.Module):
    def __init__(self, inputs: int, width: int) -> None:
        super().__init__()
        self.embedding = nn.Parameter(0.02 * torch.randn(inputs, width))

    def forward(self, input_ids: Tensor) -> Tensor:
        return F.embedding(input_ids, self.embedding)


class NoiseEmbedding(nn.Module):
    """The noise level -log alpha [b] as 256 sinusoids and a small perceptron: [b, c]."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(256, width), nn.SiLU(), nn.Linear(width, width))

    def forward(self, level: Tensor) -> Tensor:
        frequencies = torch.exp(-math.log(10_000) / 128 * torch.arange(128, device=level.device))
        angles = level[:, None] * frequencies
        embedding: Tensor = self.mlp(torch.cat([angles.cos(), angles.sin()], -1).to(next(self.parameters()).dtype))
        return embedding


class Block(nn.Module):
    def __init__(self, width: int, num_heads: int, cond_dim: int, dropout: float, causal: bool) -> None:
        super().__init__()
        self.num_heads, self.causal, self.dropout = num_heads, causal, dropout
        self.norm1 = LayerNorm(width)
        self.attn_qkv = nn.Linear(width, 3 * width, bias=False)
        self.attn_out = nn.Linear(width, width, bias=False)
        self.norm2 = LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(approximate="tanh"), nn.Linear(4 * width, width))
        if not causal:
            self.adaLN_modulation = nn.Linear(cond_dim, 6 * width)

    def forward(self, x: Tensor, c: Tensor | None, rotary: tuple[Tensor, Tensor], attend: Tensor | None) -> Tensor:
        if c is None:
            x = x + self._drop(self._attend(self.norm1(x), rotary, attend))
            return x + self._drop(self.mlp(self.norm2(x)))
        shift1, scale1, gate1, shift2, scale2, gate2 = self.adaLN_modulation(c)[:, None].chunk(6, -1)
        x = x + gate1 * self._drop(self._attend(self.norm1(x) * (1 + scale1) + shift1, rotary, attend))
        return x + gate2 * self._drop(self.mlp(self.norm2(x) * (1 + scale2) + shift2))

    def _attend(self, x: Tensor, rotary: tuple[Tensor, Tensor], attend: Tensor | None) -> Tensor:
        q, k, v = (part.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for part in self.attn_qkv(x).chunk(3, -1))
        q, k = rotate(q, rotary), rotate(k, rotary)
        causal = self.causal and attend is None
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=attend, is_causal=causal)
        out: Tensor = self.attn_out(mixed.transpose(1, 2).flatten(2))
        return out

    def _drop(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.dropout, self.training)


class Bias(nn.Module):
    """What is left of a head whose weights are the embeddings."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(outputs))


class OutputLayer(nn.Module):
    def __init__(self, width: int, outputs: int, cond_dim: int, causal: bool, tied: bool) -> None:
        super().__init__()
        self.norm_final = LayerNorm(width)
        self.linear = Bias(outputs) if tied else nn.Linear(width, outputs)
        if not causal:
            self.adaLN_modulation = nn.Linear(cond_dim, 2 * width)

    def forward(self, x: Tensor, c: Tensor | None) -> Tensor:
        if c is None:
            return self.norm_final(x)
        shift, scale = self.adaLN_modulation(c)[:, None].chunk(2, -1)
        return self.norm_final(x) * (1 + scale) + shift


class DiT(nn.Module):
    """Token ids [b, l] and noise levels [b] to hidden states [b, l, d]; `head` turns these into logits."""

    def __init__(
        self,
        inputs: int,
        outputs: int,
        hidden_size: int = 768,
        num_layers: int = 12,
        num_heads: int = 12,
        cond_dim: int = 128,
        dropout: float = 0.1,
        time_conditioning: bool = False,
        causal: bool = False,
        position_embeddings: int = 0,
        grid_embeddings: int = 0,
        tie_embeddings: bool = False,
    ) -> None:
        super().__init__()
        self.time_conditioning, self.causal, self.grid = time_conditioning, causal, grid_embeddings
        limits = [limit for limit in (position_embeddings, grid_embeddings**2) if limit]
        self.num_positions = min(limits, default=0)
        self.head_width = hidden_size // num_heads
        self.vocab_embed = Embedding(inputs, hidden_size)
        if position_embeddings:
            self.position_embed = nn.Parameter(0.02 * torch.randn(position_embeddings, hidden_size))
        if grid_embeddings:
            self.row_embed = nn.Parameter(0.02 * torch.randn(grid_embeddings, hidden_size))
            self.column_embed = nn.Parameter(0.02 * torch.randn(grid_embeddings, hidden_size))
            self.box_embed = nn.Parameter(0.02 * torch.randn(grid_embeddings, hidden_size))
        if not causal:
            self.sigma_map = NoiseEmbedding(cond_dim)
        self.blocks = nn.ModuleList(Block(hidden_size, num_heads, cond_dim, dropout, causal) for _ in range(num_layers))
        self.output_layer = OutputLayer(hidden_size, outputs, cond_dim, causal, tie_embeddings)

    def forward(self, input_ids: Tensor, level: Tensor | None, attention_mask: Tensor | None = None) -> Tensor:
        """Positions where `attention_mask` [b, l] is 0 are padding: nothing attends to them, and they count for no
        position, on whichever side they are."""
        length, device = input_ids.shape[1], input_ids.device
        positions, attend = torch.arange(length, device=device), None
        if attention_mask is not None and not bool(attention_mask.all()):
            real = attention_mask.to(device).bool()
            positions, attend = (real.cumsum(-1) - 1).clamp(min=0), real[:, None, None]
            if self.causal:
                own = torch.eye(length, dtype=torch.bool, device=device)
                attend = (attend & torch.ones_like(own).tril()) | own
        h = self.vocab_embed(input_ids)
        if self.num_positions and int(positions.max()) >= self.num_positions:
            raise ValueError(
                f"the model has embeddings for {self.num_positions} positions (got {int(positions.max()) + 1})"
            )
        if hasattr(self, "position_embed"):
            h = h + self.position_embed[positions]
        if self.grid:
            row, column, box = grid_cells(positions, self.grid)
            h = h + self.row_embed[row] + self.column_embed[column] + self.box_embed[box]
        c = None if level is None else F.silu(self.sigma_map(level))
        rotary = rotary_table(positions, self.head_width)
        for block in self.blocks:
            h = block(h, c, rotary, attend)
        out: Tensor = self.output_layer(h, c)
        return out

    def head(self, hidden: Tensor) -> Tensor:
        linear = self.output_layer.linear
        if isinstance(linear, Bias):
            return F.linear(hidden, self.vocab_embed.embedding[: len(linear.bias)], linear.bias)
        return F.linear(hidden, linear.weight, linear.bias)


def grid_cells(positions: Tensor, side: int) -> tuple[Tensor, Tensor, Tensor]:
    """Row, column and box of cells of a square grid, row by row; boxes are as square as possible, and not too high."""
    height = next(height for height in range(math.isqrt(side), 0, -1) if side % height == 0)
    row, column = positions // side, positions % side
    return row, column, row // height * height + column // (side // height)


def rotary_table(positions: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """cos and sin of position times frequency, for the two halves of a head: [l, e / 2], or [b, 1, l, e / 2]."""
    frequencies = 10_000.0 ** -(torch.arange(0, width, 2, device=positions.device) / width)
    angles = positions[..., None] * frequencies
    angles = angles if angles.dim() == 2 else angles[:, None]
    return angles.cos(), angles.sin()


def rotate(x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
    cos, sin = (table.to(x.dtype) for table in rotary)
    first, second = x.chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


@dataclasses.dataclass
class CDLMGenerationOutput(ModelOutput):
    """What `generate` returns."""

    sequences: Tensor
    """Token ids [b, l], the prompt included; behind the end of a text is padding."""
    tokens_per_forward: Tensor | None = None
    """Generated tokens up to the end of the text, divided by the evaluations of the network, for each sequence. The
    unconditional prediction of guidance, which is the same for every text, is not counted."""


@dataclasses.dataclass(frozen=True)
class Canvas:
    """What is being generated, beside the tokens."""

    free: Tensor
    """[b, l]: where tokens are generated."""
    attention_mask: Tensor
    """[b, l]: False at padding."""
    inner: Tensor
    """[b, l]: where a given token follows, so that the text cannot end."""
    first: Tensor
    """[b, l]: the first position of each text."""
    special: Tensor
    """The ids of BOS and EOS."""
    unconditional: Tensor | None
    """[b, v]: the predictions that guidance leads away from."""


class CDLMGenerationMixin:
    """`generate` for diffusion models, with the argument names of transformers' diffusion generation."""

    adjust_generation_fn = GenerationMixin.adjust_generation_fn  # reads generation_config.json

    @torch.no_grad()
    def generate(
        self: Any,
        inputs: Tensor | None = None,
        generation_config: GenerationConfig | None = None,
        *,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        streamer: Any = None,
        generator: torch.Generator | None = None,
        seed: int | None = None,
        **kwargs: Any,
    ) -> CDLMGenerationOutput | Tensor:
        """Generate texts, continuations, or infills.

        Without `inputs` (or `input_ids`, which is the same) whole texts are generated. Mask tokens in the inputs are
        replaced; inputs without any, or with `max_new_tokens`, are continued. Prompts of different lengths are padded
        on either side, with an `attention_mask`. The BOS token before a text, and EOS padding behind an infilled one,
        are put there for models that were trained with them, and are not part of the result.

        Keyword arguments override the fields of `generation_config`, and these the generation config of the model:

        - `max_new_tokens`, or `max_length` with the prompt; by default up to the length that the model was trained on
        - `max_denoising_steps`: steps in which no token is drawn need no evaluation of the network. With a number of
          steps, the one of the `step_presets` of the generation config that is closest holds
        - `order` in which positions are unmasked: random, dilated or bit-reversed
        - `temperature`, constant, or linear in the steps from `t_max` down to `t_min`; `top_k`, `top_p`;
          `do_sample=False` takes the most probable tokens
        - `guidance` relative to the unconditional prediction: 0 is off, and g equals a CFG scale of 1 + g
        - `frequency_penalty`, `presence_penalty` (OpenAI's), and `log_frequency_penalty`: this times log(1 + count of
          the token in the text) is subtracted from the logits, after the temperature
        - `num_return_sequences`; `bos_token_id`, `eos_token_id`, `pad_token_id`, `suppress_tokens`
        - `return_dict_in_generate`: False returns the sequences alone

        `streamer` gets the prompt (`put`), the current tokens after each step if it has `put_draft`, and the result
        (`put`, `end`). The noise comes from `generator`, or from a new one with `seed`, or from torch's default one.
        """
        if inputs is not None and input_ids is not None:
            raise ValueError("give inputs or input_ids, which mean the same, not both")
        if generator is not None and seed is not None:
            raise ValueError("give a generator or a seed, not both")
        inputs = input_ids if inputs is None else inputs
        settings = read_settings(self.generation_config, kwargs, generation_config)
        generator = torch.Generator().manual_seed(seed) if seed is not None else generator
        x, canvas, shown = self._first_canvas(inputs, attention_mask, settings)
        x = torch.where(canvas.free, self._prior_tokens(_uniform(x.shape, generator)), x)
        begin = int(canvas.free[:, shown].any(0).nonzero()[0])
        if streamer is not None:
            if getattr(streamer, "_takes_logits", False):
                raise ValueError("this streamer takes logits, which are not computed at all positions here")
            streamer.put(x[:, shown][:, :begin].cpu())
        forwards = torch.zeros(len(x), dtype=torch.long, device=x.device)
        step = self._unmask if self._absorbing else self._bridge
        for state, evaluated in step(x, canvas, settings, generator):
            x = state
            forwards += evaluated
            if hasattr(streamer, "put_draft"):
                streamer.put_draft(x[:, shown][:, begin:].cpu())
        x, num_tokens = self._until_end(x, canvas, settings)
        x = x[:, shown]
        if streamer is not None:
            streamer.put(x[:, begin:].cpu())
            streamer.end()
        if not settings["return_dict_in_generate"]:
            return x
        return CDLMGenerationOutput(sequences=x, tokens_per_forward=num_tokens / forwards.clamp(min=1))

    def _first_canvas(
        self: Any, inputs: Tensor | None, attention_mask: Tensor | None, settings: dict[str, Any]
    ) -> tuple[Tensor, Canvas, slice]:
        """The tokens, what goes with them, and which columns are returned."""
        vocab, about = self.config.vocab_size, getattr(self.config, "text", None) or {}
        x = torch.empty(1, 0, dtype=torch.long) if inputs is None else inputs
        if not isinstance(x, Tensor) or x.dim() != 2:
            got = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
            raise ValueError(f"the inputs must be a tensor of token ids of shape [batch, length] (got {got})")
        real = torch.ones_like(x, dtype=torch.bool) if attention_mask is None else attention_mask.bool()
        if real.shape != x.shape:
            raise ValueError(f"attention_mask has the shape {tuple(real.shape)}, and the inputs {tuple(x.shape)}")
        if bool(((x < 0) | (x >= self.prior.numel())).any()):
            raise ValueError(f"token ids of this model lie in [0, {self.prior.numel()}) (got {x.min()} to {x.max()})")
        x, real = (y.to(self.device).repeat_interleave(settings["num_return_sequences"], 0) for y in (x, real))
        free = real & (x >= vocab)
        eos, bos = (_ids(settings[name], x.device) for name in ("eos_token_id", "bos_token_id"))
        offset = 0
        if about.get("bos_framed") and len(bos):
            begins_with = x.gather(1, real.int().argmax(-1, keepdim=True)) if x.shape[1] else x
            lacks_bos = (real & ~free).any(-1, keepdim=True) & (begins_with != bos[0]).any(-1, keepdim=True)
            if bool(lacks_bos.any()):
                offset, x = 1, F.pad(x, (1, 0), value=int(bos[0]))
                real, free = torch.cat([lacks_bos, real], 1), F.pad(free, (1, 0), value=False)
        longest = int(real.sum(-1).max())
        num_new, model_length = settings["max_new_tokens"], about.get("max_length") or 0
        if num_new is None and not bool(free.any()):
            total = settings["max_length"] or model_length
            if not total:
                raise ValueError("config.json does not say how long the texts of this model are; give max_new_tokens")
            if total <= longest:
                raise ValueError(f"the prompt has {longest} tokens and leaves no room in {total}; give max_new_tokens")
            num_new = total - longest
        x, real, free = (F.pad(y, (0, num_new or 0), value=v) for y, v in ((x, 0), (real, True), (free, True)))
        end = x.shape[1]
        if not num_new and about.get("eos_padded") and len(eos):
            missing = (model_length - real.sum(-1, keepdim=True)).clamp(min=0)
            x = F.pad(x, (0, int(missing.max())), value=int(eos[0]))
            free = F.pad(free, (0, int(missing.max())), value=False)
            real = torch.cat([real, torch.arange(x.shape[1] - end, device=x.device) < missing], 1)
        inner = (real & ~free).flip(-1).cumsum(-1).flip(-1) > 0
        first = real & (real.cumsum(-1) == 1)
        unconditional = self._unconditional(real.sum(-1)) if settings["guidance"] else None
        special = torch.cat([eos, bos])
        return x, Canvas(free, real, inner, first, special, unconditional), slice(offset, end)

    def _unconditional(self: Any, lengths: Tensor) -> Tensor:
        """log b [b, v]: the mean prediction over the positions of a fully masked text of each length."""
        if self.prior.numel() == self.config.vocab_size:
            raise ValueError("this model has no mask, and so no unconditional prediction; leave out guidance")
        found = {}
        for length in set(lengths.tolist()):
            masks = torch.full((1, length), self.config.vocab_size, device=self.device)
            log_probs = _float32(self.backbone.head(self._hidden(masks, 1.0)[0])).log_softmax(-1)
            found[length] = log_probs.logsumexp(0) - math.log(length)
        return torch.stack([found[length] for length in lengths.tolist()])

    def _unmask(self: Any, x: Tensor, canvas: Canvas, settings: dict[str, Any], generator: Any) -> Any:
        """Masked models: yields the tokens after each step, and which sequences the network ran on.

        Each position has a level in (0, 1) by the unmasking order, and is still masked at time t while its level lies
        below the share of masks (1 - alpha(t)) / (1 - alpha(1)).
        """
        steps = settings["max_denoising_steps"]
        times = torch.linspace(1, 0, steps + 1, dtype=torch.float64)
        masks = 1 - self._alpha(times)
        share = masks[1:] / masks[0]
        level = unmasking_levels(settings["order"], canvas.free.cpu(), steps, generator)
        step = (steps - torch.searchsorted(share.flip(0).contiguous(), level, right=True)).to(x.device)
        for number, t in enumerate(times[:-1].tolist()):
            now = canvas.free & (step == number)
            if bool(now.any()):
                token, _ = self._draw(x, now, t, canvas, settings, generator)
                x = x.masked_scatter(now, token)
            yield x, now.any(-1)

    def _bridge(self: Any, x: Tensor, canvas: Canvas, settings: dict[str, Any], generator: Any) -> Any:
        """Models with another prior: every free position goes from t to s by the posterior of the process, which is a
        draw among three routes: the predicted token, the present one, and one of the prior."""
        posterior = settings["posterior"]
        if posterior == "auto":
            posterior = (getattr(self.config, "text", None) or {}).get("posterior", "plug-in")
        times = torch.linspace(1, 0, settings["max_denoising_steps"] + 1, dtype=torch.float64)
        for t, s in zip(times[:-1].tolist(), times[1:].tolist(), strict=True):
            now = canvas.free & (self._prior(x) > 0)  # what cannot be noise is settled
            if bool(now.any()):
                old = x[now]
                token, stay = self._draw(x, now, t, canvas, settings, generator)
                stay = (token == old).to(stay) if posterior == "mixture" else stay
                a_t, a_s = self._alpha(torch.tensor([t, s], dtype=torch.float64)).tolist()
                pi = self._prior(old).to(stay)
                to_data, to_prior = a_s * (1 - a_t / a_s) * pi, (1 - a_s) * (1 - a_t / a_s) * pi
                keep = a_t / a_s * (a_s * stay + (1 - a_s) * pi)
                route, noise = _uniform((2, len(old)), generator).to(stay)
                route = route * (keep + to_data + to_prior)
                other = torch.where(route < keep + to_data, token, self._prior_tokens(noise))
                x = x.masked_scatter(now, torch.where(route < keep, old, other))
            yield x, now.any(-1)

    def _draw(
        self: Any, x: Tensor, where: Tensor, t: float, canvas: Canvas, settings: dict[str, Any], generator: Any
    ) -> tuple[Tensor, Tensor]:
        """A token for each position [n] of `where`, and the predicted probability of the one that is there."""
        running = where.any(-1)
        hidden = self._hidden(x[running], t, canvas.attention_mask[running])[where[running]]
        sequence, old = where.nonzero()[:, 0], x[where]
        u = _uniform((len(old),), generator).to(x.device)
        token, stay = torch.empty_like(old), torch.zeros(len(old), dtype=_wide(x.device), device=x.device)
        size = max(64, _MAX_ENTRIES // self.config.vocab_size)
        for rows in (slice(begin, begin + size) for begin in range(0, len(old), size)):
            logits = self.backbone.head(hidden[rows])
            ends = canvas.inner[where][rows]
            logits = self._process(logits, x, t, sequence[rows], old[rows], ends, canvas, settings)
            probs = logits.to(stay.dtype).softmax(-1)
            cdf = probs.cumsum(-1)
            drawn = torch.searchsorted(cdf, u[rows, None].to(cdf) * cdf[:, -1:], right=True)[:, 0]
            token[rows] = drawn.clamp(max=logits.shape[-1] - 1) if settings["do_sample"] else logits.argmax(-1)
            visible = old[rows] < logits.shape[-1]
            stay[rows] = probs.gather(-1, (old[rows] * visible)[:, None])[:, 0] * visible
        return token, stay

    def _process(
        self: Any,
        logits: Tensor,
        x: Tensor,
        t: float,
        sequence: Tensor,
        old: Tensor,
        inner: Tensor,
        canvas: Canvas,
        settings: dict[str, Any],
    ) -> Tensor:
        """Guidance, suppressed tokens, penalties, temperature, log-frequency penalty, top-k, top-p, in this order."""
        logits = _float32(logits)
        if canvas.unconditional is not None:
            logits = logits + settings["guidance"] * (logits - canvas.unconditional[sequence])
        suppressed = _ids(settings["suppress_tokens"], x.device)
        if len(suppressed):
            logits = logits.index_fill(-1, suppressed, -torch.inf)
        if len(canvas.special):
            logits = torch.where(inner[:, None], logits.index_fill(-1, canvas.special, -torch.inf), logits)
        frequency, presence = settings["frequency_penalty"], settings["presence_penalty"]
        if frequency or presence:
            counts = self._counts(x, canvas.free, sequence, old, canvas).to(logits)
            logits = logits - frequency * counts - presence * (counts > 0).to(logits)
        start, end = settings["temperature"], settings["temperature_end"]
        logits = logits / (start if end is None else end + (start - end) * t)
        if settings["log_frequency_penalty"]:
            counts = self._counts(x, canvas.attention_mask, sequence, old, canvas)
            logits = logits - settings["log_frequency_penalty"] * counts.to(logits).log1p()
        if 0 < settings["top_k"] < logits.shape[-1]:
            best = logits.topk(settings["top_k"])
            logits = torch.full_like(logits, -torch.inf).scatter(-1, best.indices, best.values)
        if settings["top_p"] < 1:
            ranked, index = logits.sort(-1, descending=True)
            share = ranked.to(_wide(x.device)).softmax(-1)  # the first token stays in any case
            ranked = ranked.masked_fill(share.cumsum(-1) - share >= settings["top_p"], -torch.inf)
            logits = torch.empty_like(logits).scatter(-1, index, ranked)
        return logits

    def _counts(self: Any, x: Tensor, where: Tensor, sequence: Tensor, old: Tensor, canvas: Canvas) -> Tensor:
        """How often each token occurs `where` it counts, at other positions than that of the row; masks, BOS and EOS do
        not count."""
        vocab = self.config.vocab_size
        counted = where & (x < vocab) & ~torch.isin(x, canvas.special)
        counts = torch.zeros(len(x), vocab, device=x.device)
        counts = counts.scatter_add_(1, x.clamp(max=vocab - 1), counted.float())[sequence]
        own = (old < vocab) & ~torch.isin(old, canvas.special)
        return counts.scatter_add_(1, old.clamp(max=vocab - 1)[:, None], -own[:, None].float())

    def _until_end(self: Any, x: Tensor, canvas: Canvas, settings: dict[str, Any]) -> tuple[Tensor, Tensor]:
        """Padding behind the end of each text, and the number of generated tokens before it.

        A text ends with its first EOS. One of a model that was trained on EOS-padded texts ends where EOS tokens begin
        to prevail, as a sampler of few steps may put one into the middle of a text, or a word behind its end.
        """
        eos = _ids(settings["eos_token_id"], x.device)
        open_end = canvas.free & ~canvas.inner & ~canvas.first
        is_eos = open_end & torch.isin(x, eos)
        before = F.pad(is_eos.cumsum(-1), (1, 0))
        if (getattr(self.config, "text", None) or {}).get("eos_padded"):
            words = open_end & ~is_eos
            errors = before + words.sum(-1, keepdim=True) - F.pad(words.cumsum(-1), (1, 0))
            end = errors.shape[1] - 1 - errors.flip(-1).argmin(-1, keepdim=True)
            after = torch.arange(x.shape[1], device=x.device) >= end
        else:
            after = before[:, :-1] > 0
        pad = eos[:1].tolist() if settings["pad_token_id"] is None else [settings["pad_token_id"]]
        if pad:
            x = x.masked_fill(after & open_end, pad[0])
        return x, (canvas.free & ~(after & open_end)).sum(-1)


def read_settings(
    config: GenerationConfig, given: dict[str, Any], given_config: GenerationConfig | None = None
) -> dict[str, Any]:
    """The complete settings of a call: what is given, else the generation config of the model, else `DEFAULTS`.

    What that configuration was not chosen for it does not say: with a number of steps, the closest of its
    `step_presets` replaces its sampler, and with another order, the defaults do.
    """
    given = {name: value for name, value in given.items() if value is not None}
    unknown = [name for name in given if name not in DEFAULTS]
    if unknown:
        raise TypeError(f"generate() does not take {', '.join(unknown)}; choose from {', '.join(DEFAULTS)}")
    if given_config is not None:
        fields = _renamed(given_config.to_dict())
        _check_supported(fields)
        given = {name: value for name, value in fields.items() if name in DEFAULTS} | given
    own = _renamed(config.to_dict())
    presets = own.pop("step_presets", None)
    if presets and "max_denoising_steps" in given:
        distance = {
            abs(math.log(_renamed(p)["max_denoising_steps"] / given["max_denoising_steps"])): p for p in presets
        }
        own = {name: value for name, value in own.items() if name not in _SAMPLER_FIELDS}
        own |= _renamed(distance[min(distance)])
    if given.get("order", own.get("order", DEFAULTS["order"])) != own.get("order", DEFAULTS["order"]):
        own = {name: value for name, value in own.items() if name not in _SAMPLER_FIELDS}
    _check_supported(own)
    settings = DEFAULTS | {name: value for name, value in own.items() if name in DEFAULTS} | given
    if (settings["t_max"] is None) != (settings["t_min"] is None):
        raise ValueError("t_max and t_min belong together: the temperature falls from the one to the other")
    if settings["t_max"] is not None and not {"temperature", "temperature_end"} & given.keys():
        settings |= {"temperature": settings["t_max"], "temperature_end": settings["t_min"]}
    _check_values(settings)
    return settings


def _renamed(config: dict[str, Any]) -> dict[str, Any]:
    """A generation config without empty fields; that of an earlier version says steps for max_denoising_steps."""
    config = {name: value for name, value in config.items() if value is not None}
    return {"max_denoising_steps" if name == "steps" else name: value for name, value in config.items()}


def _check_supported(config: dict[str, Any]) -> None:
    """Refuse a generation config that asks for what this file does not do; fields that nobody defines are ignored."""
    known = GenerationConfig().to_dict().keys() | set(_DIFFUSION_ONLY)
    ignored = {"transformers_version", "use_cache", "_from_model_config"}
    for name, value in config.items():
        if value not in _PACKAGE_ONLY.get(name, (value,)):
            raise ValueError(
                f"the generation config asks for {name}={value!r}, which is not in this file; use the package: "
                "cdlm.load(directory).sample()"
            )
        off = value is False or (value is not True and value in (0, 1))
        if name in known and name not in DEFAULTS and name not in ignored and not off:
            raise ValueError(f"{name} is not supported by this model (got {value!r}); remove it from the configuration")


def _check_values(settings: dict[str, Any]) -> None:
    for name in ("max_denoising_steps", "max_new_tokens", "max_length", "num_return_sequences"):
        value = settings[name]
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise ValueError(f"{name} must be an integer of at least 1 (got {value!r})")
    for name in ("temperature", "temperature_end"):
        if settings[name] is not None and not settings[name] > 0:
            raise ValueError(f"{name} must be above 0 (got {settings[name]!r}); for greedy tokens: do_sample=False")
    if settings["order"] not in ORDERS:
        raise ValueError(f"order must be one of {', '.join(ORDERS)} (got {settings['order']!r})")
    if settings["posterior"] not in ("auto", "plug-in", "mixture"):
        raise ValueError(f"posterior must be auto, plug-in or mixture (got {settings['posterior']!r})")
    if settings["guidance"] < 0:
        raise ValueError(f"guidance must be at least 0 (got {settings['guidance']!r})")
    if settings["top_k"] < 0:
        raise ValueError(f"top_k must be at least 0 (got {settings['top_k']!r})")
    if not 0 < settings["top_p"] <= 1:
        raise ValueError(f"top_p must be above 0 and at most 1 (got {settings['top_p']!r})")


def unmasking_levels(order: str, is_mask: Tensor, steps: int, generator: torch.Generator | None) -> Tensor:
    """A level in (0, 1) for every position [b, l]; high levels are unmasked first.

    random: independent; dilated: the positions of a step are `steps` apart; bit-reversed: each step halfway between
    what is there already. Only masked positions are counted.
    """
    if order == "random":
        return _uniform(is_mask.shape, generator)
    offset = (_uniform((len(is_mask), 1), generator) * 2**20).long()
    place = is_mask.cumsum(-1) - 1 + offset
    if order == "bit-reversed":
        return _radical_inverse(place)
    turn = _uniform((len(is_mask), steps), generator).argsort(-1).argsort(-1)
    within = _radical_inverse(place // steps) * (1 - 2e-6) + 1e-6
    return (turn.gather(-1, place % steps) + within) / steps


def _radical_inverse(place: Tensor) -> Tensor:
    """In base 2: the binary digits of a number, mirrored behind the point."""
    value = torch.zeros(place.shape, dtype=torch.float64)
    for bit in range(30):
        value += (place >> bit & 1) * 2.0 ** -(bit + 1)
    return value


def _uniform(shape: Any, generator: torch.Generator | None) -> Tensor:
    """On the CPU, whatever the device of the generator."""
    device = "cpu" if generator is None else generator.device
    dtype = _wide(torch.device(device))
    return torch.rand(shape, generator=generator, device=device, dtype=dtype).cpu().double()


def _ids(value: Any, device: torch.device) -> Tensor:
    """One token id, several, or none."""
    return torch.tensor([] if value is None else value, dtype=torch.long, device=device).reshape(-1)


def _float32(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _wide(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "mps" else torch.float64


class CDLMPreTrainedModel(PreTrainedModel):
    config_class = CDLMConfig  # type: ignore[mutable-override]
    main_input_name = "input_ids"
    _no_split_modules = {"Block"}  # type: ignore[mutable-override]  # noqa: RUF012
    backbone: DiT

    def __init__(self, config: CDLMConfig) -> None:
        super().__init__(config)
        if "custom" in config.network:
            name = config.network["custom"]
            raise ValueError(
                f"these are weights of a custom network; open them with cdlm.load(..., network={name}(...))"
            )
        if config.network.get("joint_layers"):
            raise ValueError("this model has a joint head, which this file does not support; open it with cdlm.load")

    def _init_weights(self, module: nn.Module) -> None:
        """Weights come from a file."""


class CDLMForMaskedLM(CDLMPreTrainedModel, CDLMGenerationMixin):
    """The denoiser f(x_t, t). `logits` are log f, normalised: one column for each clean token, and none for the mask,
    whose id is `vocab_size`. A token that cannot be noise, such as any visible token of a masked model, is carried over
    with probability 1.

    `timesteps` lie in [0, 1], where 1 is noise: one for each sequence, or one for all; only time-conditioned models
    need them. `labels` add the mean cross entropy where they are not -100.
    """

    prior: Tensor

    def __init__(self, config: CDLMConfig) -> None:
        super().__init__(config)
        if config.process is None:
            raise ValueError("this is an autoregressive model; open it with AutoModelForCausalLM")
        if config.process["noise_schedule"] not in ("log-linear", "cosine"):
            raise ValueError(f"unknown noise schedule {config.process['noise_schedule']!r}")
        vocab = config.vocab_size
        has_mask = config.process["name"] == "masked" or config.process.get("num_states") == vocab + 1
        self.backbone = DiT(vocab + has_mask, vocab, **config.network)
        self.register_buffer("prior", torch.zeros(vocab + has_mask, dtype=torch.float64))
        self.post_init()

    def forward(
        self,
        input_ids: Tensor,
        timesteps: Tensor | float | None = None,
        labels: Tensor | None = None,
        return_dict: bool | None = None,
        attention_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> MaskedLMOutput | tuple[Tensor, ...]:
        _check_arguments(kwargs, "input_ids, attention_mask, timesteps and labels")
        if timesteps is None and self.backbone.time_conditioning:
            raise ValueError("this model is time-conditioned: give timesteps in [0, 1], one for each sequence")
        t = torch.as_tensor(1.0 if timesteps is None else timesteps, dtype=torch.float64, device="cpu")
        t = t.expand(len(input_ids))
        if not bool(((t >= 0) & (t <= 1)).all()):
            raise ValueError("timesteps lie in [0, 1], where 0 is data and 1 is noise")
        logits = _float32(self.backbone.head(self._hidden(input_ids, t, attention_mask))).log_softmax(-1)
        vocab = self.config.vocab_size
        known = (self._prior(input_ids) == 0) | ((t == 0).to(input_ids.device)[:, None] & (input_ids < vocab))
        certain = torch.full_like(logits, -torch.inf).scatter(-1, input_ids.clamp(max=vocab - 1)[..., None], 0.0)
        logits = torch.where(known[..., None], certain, logits)
        loss = None if labels is None else F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
        if return_dict is False:
            return (logits,) if loss is None else (loss, logits)
        return MaskedLMOutput(loss=loss, logits=logits)  # type: ignore[arg-type]

    def _hidden(self, x: Tensor, t: Tensor | float, attention_mask: Tensor | None = None) -> Tensor:
        """Hidden states [b, l, d] at time t."""
        t = torch.as_tensor(t, dtype=torch.float64).expand(len(x))
        level = -torch.log(self._alpha(t)) if self.backbone.time_conditioning else torch.zeros_like(t)
        return self.backbone(x, level.to(torch.float32).to(x.device), attention_mask)

    def _alpha(self, t: Tensor) -> Tensor:
        """The share of signal left at time t, from 1 at t = 0 to eps at t = 1."""
        about = self.config.process
        lost = t if about["noise_schedule"] == "log-linear" else torch.sin(t * (math.pi / 2))
        return 1 - (1 - about["eps"]) * lost

    @property
    def _absorbing(self) -> bool:
        """Whether all noise is the mask."""
        return self.prior.numel() > self.config.vocab_size and float(self.prior[-1]) == 1

    def _prior(self, x: Tensor) -> Tensor:
        """pi[x]."""
        prior = self.prior.to(x.device, _wide(x.device))
        return (prior / prior.sum())[x]

    def _prior_tokens(self, u: Tensor) -> Tensor:
        """Draws from the prior by inverting its distribution function."""
        cdf = self.prior.cpu().double().cumsum(0)
        token = torch.searchsorted(cdf, u.cpu().double() * cdf[-1], right=True).clamp(max=len(cdf) - 1)
        return token.to(self.device)


class CDLMForCausalLM(CDLMPreTrainedModel, GenerationMixin):
    """The autoregressive baseline. `generate` is that of transformers, without a cache."""

    def __init__(self, config: CDLMConfig) -> None:
        super().__init__(config)
        if config.process is not None:
            raise ValueError("this is a diffusion model; open it with AutoModelForMaskedLM")
        self.backbone = DiT(config.vocab_size, config.vocab_size, **config.network)
        self.post_init()

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        return_dict: bool | None = None,
        **kwargs: Any,
    ) -> CausalLMOutput | tuple[Tensor, ...]:
        _check_arguments(kwargs, "input_ids, attention_mask and labels")
        logits = self.backbone.head(self.backbone(input_ids, None, attention_mask))
        loss = None
        if labels is not None:
            loss = F.cross_entropy(_float32(logits[:, :-1]).flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)
        if return_dict is False:
            return (logits,) if loss is None else (loss, logits)
        return CausalLMOutput(loss=loss, logits=logits)  # type: ignore[arg-type]

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False

    def prepare_inputs_for_generation(  # type: ignore[override]
        self, input_ids: Tensor, attention_mask: Tensor | None = None, **kwargs: Any
    ) -> dict[str, Any]:
        return {"input_ids": input_ids, "attention_mask": attention_mask}


def _check_arguments(kwargs: dict[str, Any], known: str) -> None:
    unknown = [name for name, value in kwargs.items() if name not in _UNUSED_ARGUMENTS and value is not None]
    if unknown:
        raise TypeError(f"forward takes {known}, and no {', '.join(unknown)}")
