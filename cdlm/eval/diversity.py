"""How varied a text is."""

from jaxtyping import Float
from torch import Tensor

from cdlm.types import Tokens


def entropy(x: Tokens) -> Float[Tensor, "b"]:
    """The unigram entropy of each sequence's own tokens, in nats: log l if all differ, 0 if all are the same."""
    same = (x[:, :, None] == x[:, None, :]).sum(-1).double()
    return (x.shape[1] / same).log().mean(-1)
