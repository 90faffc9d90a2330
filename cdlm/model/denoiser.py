"""The denoiser f_theta(x_t, t): for each position a law over clean tokens."""

import functools
import math
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from cdlm.devices import send
from cdlm.model.config import NetworkConfig
from cdlm.model.custom import CustomBackbone
from cdlm.model.dit import DiT
from cdlm.model.joint import JointHead, conditioned
from cdlm.process.process import Process
from cdlm.types import LogLaw, Mixture, Time, Tokens, to_device

IMPOSSIBLE = -1e4
"""The logit of a token that is never generated: its probability is 0, and 0 * log 0 is no NaN."""


class Denoiser(nn.Module):
    """f_theta, split so that the head can run on chosen rows: `features` to hidden rows, `head` to log-laws.

    The predicted law has one entry for each clean token and none for the mask. Where pi[x_t] = 0 the clean token is
    known and carried over; at t = 0 it is known everywhere: f(x_0, 0) = x_0. Without a process it is the
    autoregressive baseline, whose row i predicts token i + 1.

    `network` describes a `DiT`, which is then built, or is a module of your own with `forward(ids, t) -> logits`
    (`cdlm.types.LogitsNetwork`); one that has `hidden_states` and a `head` too (`cdlm.types.HiddenStatesNetwork`) is
    faster. Without a `process` it must be causal, and `vocab` is the number of tokens.
    """

    def __init__(
        self, network: NetworkConfig | nn.Module, process: Process | None = None, vocab: int | None = None
    ) -> None:
        super().__init__()
        config = network if isinstance(network, NetworkConfig) else None
        if isinstance(network, Denoiser):
            raise ValueError("a Denoiser wraps a network, not another Denoiser; pass the network itself")
        if config is not None and (process is None) != config.causal:
            raise ValueError(
                "a causal network models next tokens and takes `vocab`; any other network takes a `process`"
            )
        if process is None and vocab is None:
            raise ValueError("a causal network has no process to tell its vocabulary: give `vocab`")
        if process is not None and vocab is not None and vocab != process.vocab:
            raise ValueError(
                f"the process has a vocabulary of {process.vocab} tokens (got vocab {vocab}); leave it out"
            )
        if process is not None and config is not None and config.time_conditioning and not process.noise.eps > 0:
            raise ValueError(
                f"a network that is told the time sees -log alpha(t), which has no end at t = 1 where eps = "
                f"{process.noise.eps:g}; use a noise schedule with eps > 0, such as 0.001"
            )
        if config is not None and config.joint_layers and not (process is not None and process.absorbing):
            raise ValueError(
                "a joint head predicts the tokens that a step reveals, so it needs a masked process; leave out "
                "joint_layers"
            )
        self.process = process
        self.vocab: int = process.vocab if process is not None else vocab or 0
        self.backbone: DiT | CustomBackbone
        if isinstance(network, NetworkConfig):
            self.backbone = DiT(network, self.vocab if process is None else process.states, self.vocab)
        else:
            self.backbone = CustomBackbone(network, process, self.vocab)
        self.joint_head = JointHead(config) if config is not None and config.joint_layers else None

    @property
    def dit(self) -> DiT:
        """The network of the package, for what works with no other."""
        if not isinstance(self.backbone, DiT):
            raise ValueError(f"this works only with the network of cdlm, a DiT (got {self.backbone.name})")
        return self.backbone

    @property
    def config(self) -> NetworkConfig:
        return self.dit.config

    @property
    def custom_network(self) -> str | None:
        """The name of the class of a network of the user's own; None for that of the package."""
        return None if isinstance(self.backbone, DiT) else self.backbone.name

    @property
    def masked_lm(self) -> dict[str, Any] | None:
        """The description of a masked language model of transformers, for a network that is one."""
        return None if isinstance(self.backbone, DiT) else self.backbone.masked_lm

    @property
    def time_conditioning(self) -> bool:
        """Whether predictions may depend on the time."""
        return not isinstance(self.backbone, DiT) or self.backbone.config.time_conditioning

    @property
    def position_invariant(self) -> bool:
        """Whether it predicts one law at all positions of a fully masked sequence: rotary attention mixes values only,
        and there they are all equal."""
        if self.process is None or not isinstance(self.backbone, DiT):
            return False
        return self.process.has_mask and not (self.config.position_embeddings or self.config.grid_embeddings)

    @property
    def device(self) -> torch.device:
        return self.backbone.device

    @property
    def dtype(self) -> torch.dtype:
        """That of the weights."""
        return self.backbone.dtype

    @property
    def linear_head(self) -> tuple[Float[Tensor, "v d"], Float[Tensor, "v"]] | None:
        """Weight and bias of the head; None for a network without hidden states, whose features are its logits."""
        if self.backbone.head is None:
            return None
        weight, bias = self.backbone.head
        return weight, self._without_special(bias)

    def features(
        self, x: Tokens | Mixture, alpha: Time, rows: Int[Tensor, "b r"] | None = None
    ) -> Float[Tensor, "b k d"]:
        """Hidden rows at the signal level alpha, the network's only notion of time; or at chosen `rows` alone."""
        return self.backbone.features(to_device(x, self.device), alpha, rows)

    def condition(
        self, hidden: Float[Tensor, "b l d"], x: Tokens, revealed: Bool[Tensor, "b l"]
    ) -> Float[Tensor, "b l d"]:
        """Hidden rows of which those at `revealed` positions also see the tokens that x has at the revealed positions
        before them: by the joint head."""
        if self.joint_head is None:
            raise ValueError("this network has no joint head; set joint_layers=1 in its NetworkConfig")
        return conditioned(self.joint_head, self.dit.vocab_embed, hidden, send(x, hidden.device), revealed)

    def logits(self, rows: Float[Tensor, "*n d"]) -> LogLaw:
        """The head before normalisation, in the precision of the network: all that a draw needs."""
        logits = self.backbone.logits(rows)[..., : self.vocab]  # `accelerate` pads it; others may have one for the mask
        return self._without_special(logits)

    def _without_special(self, logits: Float[Tensor, "*n columns"]) -> Float[Tensor, "*n columns"]:
        """Logits, or a bias, under which special tokens have probability 0, and log-probabilities are finite."""
        if self.process is None or not self.process.special:
            return logits
        return logits.index_fill(-1, self._special.to(logits.device), IMPOSSIBLE)

    @functools.cached_property
    def _special(self) -> Int[Tensor, "n"]:
        return torch.tensor(() if self.process is None else self.process.special, dtype=torch.long)

    def head(self, rows: Float[Tensor, "*n d"]) -> LogLaw:
        """Log-probabilities over the clean vocabulary, in fp32 or wider."""
        logits = self.logits(rows)
        return logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)

    def forward(self, x_t: Tokens, t: Time | float = 1.0) -> LogLaw:
        """f_theta(x_t, t) at every position, with carry-over and the boundary condition."""
        t = torch.as_tensor(t, dtype=torch.float64).cpu().expand(len(x_t))
        if not bool(((t >= 0) & (t <= 1)).all()):
            raise ValueError("times lie in [0, 1], where 0 is data and 1 is noise")
        if self.process is None:
            return self.head(self.features(x_t, torch.ones_like(t)))
        law = self.head(self.features(x_t, self.process.noise.alpha(t)))
        x_t = x_t.to(self.device)
        known = ~self.process.positions(x_t) | ((t == 0).to(self.device)[:, None] & (x_t < self.vocab))
        token = x_t.clamp(max=self.vocab - 1)[..., None]
        certain = torch.full_like(law, -torch.inf).scatter(-1, token, 0.0)
        return torch.where(known[..., None], certain, law)

    def count(self) -> int:
        """Trainable parameters; what `accelerate` pads the head with, or copies into it, is none."""
        if not isinstance(self.backbone, DiT):
            return sum(parameter.numel() for parameter in self.parameters() if parameter.requires_grad)
        head = sum(parameter.numel() for parameter in self.backbone.output_layer.linear.parameters())
        own = self.vocab * (1 if self.config.tie_embeddings else 1 + self.config.hidden_size)
        return sum(parameter.numel() for parameter in self.parameters()) - head + own


def mean_law(laws: Float[Tensor, "k v"]) -> Float[Tensor, "v"]:
    """The mean of the predictions at all positions of a fully masked text: token frequencies. Logarithms in and out."""
    return laws.logsumexp(0) - math.log(len(laws))
