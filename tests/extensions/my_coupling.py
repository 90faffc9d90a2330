"""A coupling from outside the package: whole spans of tokens are masked together; and a method made of it."""

import dataclasses

import torch

from cdlm.methods import METHODS, Method
from cdlm.objective import Objective, Revealed, Term, Times, inverse_step, kl, pair_of
from cdlm.process import Process
from cdlm.schedules import PAPER_STEPS, constant


@dataclasses.dataclass(frozen=True)
class Spans:
    """The bridge, with one draw for all positions of a span: each of `width` tokens, from a random place on.

    A position alone is masked as ever, and different spans are independent.
    """

    process: Process
    width: int

    def __post_init__(self):
        if not self.process.absorbing or self.width < 1:
            raise ValueError(f"spans of at least one mask; got a width of {self.width}, {self.process.name} noise")

    def __call__(self, x0, s, t, rng, teacher=None):
        self.process.check_ids(x0)
        place = torch.arange(x0.shape[1], device=x0.device) + rng("offset").integers(1, self.width, x0.device)
        spans = rng("level").uniform(x0.shape[1], x0.device)  # never more spans than positions
        level = spans.gather(1, place // self.width)

        def noised(time):
            masks = 1 - self.process.noise.alpha(time)
            return torch.where(level < masks.to(level)[:, None], self.process.vocab, x0)

        return pair_of(self.process, x0, noised(s), noised(t), s, t)

    def __str__(self):
        return f"Spans({self.process.name}, {self.width})"


def span_hops(process: Process, total: int = PAPER_STEPS, *, steps: int = 8, width: int = 4) -> Objective:
    """The tokens that a hop reveals, where whole spans are revealed together: `steps` hops, spans of `width` tokens."""
    times = Times(constant(1 / steps), constant(1 / steps), whole=True)
    return Objective((Term("hop", times, Spans(process, width), Revealed(), kl, inverse_step),), total)


METHODS["span-hops"] = Method("Span hops", span_hops, "masked")

if __name__ == "__main__":
    from cdlm.__main__ import main

    main()
