"""Networks by the shape of their batch."""

import weakref

import torch

from cdlm.model import compile as record


def test_graphs_of_old_shapes_go() -> None:
    kept: list[weakref.ref[torch.Tensor]] = []

    def forward(x: torch.Tensor, level: torch.Tensor, rotary: object, rows: torch.Tensor | None) -> torch.Tensor:
        if x.shape[1] not in {held().shape[1] for held in kept if held() is not None}:
            kept.append(weakref.ref(x))
        return x + level[:, None]

    call = record._by_shape(forward)
    for _ in range(2):
        for length in range(1, 3 * record.SHAPES):
            for often in (length, 1):  # the shortest is used all the time, and stays
                x, level = torch.rand(2, often), torch.rand(2)
                assert torch.equal(call(x, level, (x, x)), x + level[:, None])
    alive = [held().shape[1] for held in kept if held() is not None]
    assert len(alive) == record.SHAPES
    assert 1 in alive
    assert sum(held() is None for held in kept) > record.SHAPES
