"""A network of your own in the place of `DiT`: any module with `forward(ids, t) -> logits` (`cdlm.types.LogitsNetwork`)."""

import itertools

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
        self.columns = (vocab,) if process is None or not process.has_mask else (vocab, vocab + 1)
        self.has_hidden_states = isinstance(network, HiddenStatesNetwork)
        odd = [name for name, value in network.state_dict().items() if not isinstance(value, Tensor)]
        if odd:
            raise ValueError(f"{self.name} keeps {odd[0]!r} in its state_dict, which is no tensor and cannot be saved")
        if self.has_hidden_states:
            self._check_head()

    @property
    def name(self) -> str:
        return type(self.network).__name__

    @property
    def device(self) -> torch.device:
        tensors = itertools.chain(self.parameters(), self.buffers())
        return next((tensor.device for tensor in tensors), torch.device("cpu"))

    @property
    def dtype(self) -> torch.dtype:
        kinds = (parameter.dtype for parameter in self.parameters() if parameter.is_floating_point())
        return next(kinds, torch.float32)

    @property
    def head(self) -> tuple[Float[Tensor, "v d"], Float[Tensor, "v"]] | None:
        """Weight and bias of the map from hidden states to logits; None where the features are the logits."""
        if not self.has_hidden_states:
            return None
        linear = self.network.head
        return linear.weight, linear.weight.new_zeros(len(linear.weight)) if linear.bias is None else linear.bias

    def features(
        self, x: Tokens | Mixture, alpha: Time, rows: Int[Tensor, "b r"] | None = None
    ) -> Float[Tensor, "b k d"]:
        if isinstance(x, Mixture):
            raise ValueError(
                f"{self.name} takes token ids, and this objective feeds mixtures of tokens (the curriculum of DUO); use "
                "duo:curriculum=0"
            )
        t = send(self._time(alpha), self.device)
        if self.has_hidden_states:
            found, widths = self.network.hidden_states(x, t), (self.network.head.in_features,)
        else:
            found, widths = self.network(x, t), self.columns
        self._check(found, x, widths)
        return found if rows is None else take_positions(found, rows)

    def logits(self, rows: Float[Tensor, "*n d"]) -> LogLaw:
        return self.network.head(rows) if self.has_hidden_states else rows

    def _time(self, alpha: Time) -> Time:
        """The time at which the process has this signal level; 0 (data) without a process."""
        t = torch.zeros_like(alpha) if self.process is None else self.process.noise.inverse(alpha).clamp(0, 1)
        return t.to(torch.promote_types(self.dtype, torch.float32))

    def _check(self, found: Tensor, x: Tokens, widths: tuple[int, ...]) -> None:
        if isinstance(found, Tensor) and found.shape[:-1] == x.shape and found.shape[-1] in widths:
            return
        what = "hidden states" if self.has_hidden_states else "logits"
        got = f"of shape {tuple(found.shape)}" if isinstance(found, Tensor) else f"as a {type(found).__name__}"
        shapes = " or ".join(str((*x.shape, width)) for width in widths)
        raise ValueError(
            f"{self.name} returned {what} {got} for token ids of shape {tuple(x.shape)}; they must be a tensor of shape "
            f"{shapes}{self._columns_in_words()}"
        )

    def _check_head(self) -> None:
        head = self.network.head
        if not isinstance(head, nn.Linear):
            raise ValueError(
                f"{self.name} has hidden_states, so its head must be a torch.nn.Linear (got {type(head).__name__}); "
                "without hidden_states, any network works by forward(ids, t) alone"
            )
        if head.out_features not in self.columns:
            raise ValueError(
                f"the head of {self.name} has {head.out_features} outputs; it must have "
                f"{' or '.join(map(str, self.columns))}{self._columns_in_words()}"
            )

    def _columns_in_words(self) -> str:
        return ": one logit for each clean token" + (", or one more for the mask" if len(self.columns) == 2 else "")
