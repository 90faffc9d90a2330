"""A network of the user's own in the place of `DiT`: any module with `forward(ids, t) -> logits`.

`cdlm.types` has the interface: `LogitsNetwork`, and `HiddenStatesNetwork` for the fast path.
"""

import dataclasses
import itertools
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from cdlm.devices import send
from cdlm.model.dit import take_positions
from cdlm.process.process import Process
from cdlm.types import HiddenStatesNetwork, LogLaw, Mixture, Time, Tokens


class CustomBackbone(nn.Module):
    """The interface of `DiT` over such a network.

    Its features are the hidden states of a `HiddenStatesNetwork`, and the logits themselves of any other network.
    """

    def __init__(self, network: nn.Module, process: Process | None, vocab: int) -> None:
        super().__init__()
        self.network, self.process = network, process
        self._has_mask = process is not None and process.has_mask
        self._num_ids = vocab + self._has_mask
        self.columns = (vocab, vocab + 1) if self._has_mask else (vocab,)
        odd = [name for name, value in network.state_dict().items() if not isinstance(value, Tensor)]
        if odd:
            raise ValueError(f"{self.name} has {odd[0]!r} in its state_dict, which is not a tensor; make it a buffer")
        if self._split is not None:
            self._check_head(self._split.head)

    @property
    def name(self) -> str:
        return getattr(self.network, "display_name", type(self.network).__name__)

    @property
    def masked_lm(self) -> dict[str, Any] | None:
        """The description of a masked language model of transformers, if it is one."""
        return masked_lm_of(self.network)

    @property
    def device(self) -> torch.device:
        tensors = itertools.chain(self.parameters(), self.buffers())
        return next((tensor.device for tensor in tensors), torch.device("cpu"))

    @property
    def dtype(self) -> torch.dtype:
        dtypes = (parameter.dtype for parameter in self.parameters() if parameter.is_floating_point())
        return next(dtypes, torch.float32)

    @property
    def head(self) -> tuple[Float[Tensor, "v d"], Float[Tensor, "v"]] | None:
        """Weight and bias of the map from hidden states to logits; None where the features are the logits."""
        if self._split is None:
            return None
        weight, bias = self._split.head.weight, self._split.head.bias
        return weight, weight.new_zeros(len(weight)) if bias is None else bias

    def features(
        self, x: Tokens | Mixture, alpha: Time, rows: Int[Tensor, "b r"] | None = None
    ) -> Float[Tensor, "b k d"]:
        """Hidden states or logits at the signal level alpha, or at chosen `rows` alone."""
        if isinstance(x, Mixture):
            raise ValueError(
                f"{self.name} takes token ids, but this objective feeds mixtures of tokens, as the curriculum of DUO "
                "does; use duo:curriculum=0"
            )
        t = send(self._time(alpha), self.device)
        try:
            found = self.network(x, t) if self._split is None else self._split.hidden_states(x, t)
        except IndexError as error:
            raise ValueError(
                f"{self.name} failed on token ids up to {int(x.max())} ({error}); its embeddings need "
                f"{self._num_ids} rows{', as the mask is the last id' if self._has_mask else ''}."
            ) from error
        if self._split is None:
            self._check("logits", found, x, self.columns)
        else:
            self._check("hidden states", found, x, (self._split.head.in_features,))
        return found if rows is None else take_positions(found, rows)

    def logits(self, rows: Float[Tensor, "*n d"]) -> LogLaw:
        return rows if self._split is None else self._split.head(rows)

    @torch.no_grad()
    def check_interface(self, length: int) -> None:
        """Run the network once, and refuse one that breaks what the fast path or an autoregressive method rely on."""
        was_training = self.training
        self.eval()
        ids = torch.arange(2 * length, device=self.device).remainder(self._num_ids).view(2, length)
        alpha = torch.full((2,), 0.5, dtype=torch.float64)
        with torch.random.fork_rng(devices=[]):
            features = self.features(ids, alpha)
            if self._split is not None:
                logits = self.network(ids, send(self._time(alpha), self.device))
                self._check("logits", logits, ids, self.columns)
                if not torch.allclose(logits, self.logits(features), rtol=1e-3, atol=1e-3):
                    raise ValueError(
                        f"forward(ids, t) of {self.name} is not head(hidden_states(ids, t)), which the fast path "
                        "computes; make them equal, or rename hidden_states to go without the fast path."
                    )
            if self.process is None:
                changed = ids.clone()
                changed[:, -1] = (ids[:, -1] + 1).remainder(self._num_ids)
                if not torch.allclose(features[:, :-1], self.features(changed, alpha)[:, :-1], rtol=1e-3, atol=1e-3):
                    raise ValueError(
                        f"{self.name} is not causal: its predictions depend on later tokens, so that an "
                        "autoregressive method would see the answer; mask its attention, or use a diffusion method."
                    )
        self.train(was_training)

    @property
    def _split(self) -> HiddenStatesNetwork | None:
        """The network, if it has hidden states and a head."""
        return self.network if isinstance(self.network, HiddenStatesNetwork) else None

    def _time(self, alpha: Time) -> Time:
        """The time at which the process has this signal level; 0 (data) without a process."""
        t = torch.zeros_like(alpha) if self.process is None else self.process.noise.inverse(alpha).clamp(0, 1)
        return t.to(torch.promote_types(self.dtype, torch.float32))

    def _check(self, what: str, found: object, x: Tokens, widths: tuple[int, ...]) -> None:
        if isinstance(found, Tensor) and found.shape[:-1] == x.shape and found.shape[-1] in widths:
            return
        got = f"of shape {tuple(found.shape)}" if isinstance(found, Tensor) else f"as a {type(found).__name__}"
        shapes = " or ".join(str((*x.shape, width)) for width in widths)
        raise ValueError(
            f"{self.name} returned {what} {got} for token ids of shape {tuple(x.shape)}; return a tensor of shape "
            f"{shapes}{self._columns_in_words() if widths == self.columns else ''}"
        )

    def _check_head(self, head: object) -> None:
        if not isinstance(head, nn.Linear):
            raise ValueError(
                f"{self.name} has hidden_states, so its head must be a torch.nn.Linear (got {type(head).__name__}); "
                "without hidden_states, forward(ids, t) is all that is used"
            )
        if head.out_features not in self.columns:
            raise ValueError(
                f"the head of {self.name} must have {' or '.join(map(str, self.columns))} outputs"
                f"{self._columns_in_words()} (got {head.out_features})"
            )

    def _columns_in_words(self) -> str:
        return ": one logit for each clean token" + (", or one more for the mask" if len(self.columns) == 2 else "")


def masked_lm_of(network: nn.Module | None) -> dict[str, Any] | None:
    """The description of a network of `cdlm.interop.masked_lm`; None for any other."""
    description = getattr(network, "description", None)
    found: dict[str, Any] = {}
    if dataclasses.is_dataclass(description) and not isinstance(description, type):
        found = dataclasses.asdict(description)
    return found or None
