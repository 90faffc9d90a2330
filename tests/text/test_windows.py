"""Windows, with a sampler that only counts: every position once, what is there stays, and sums that add up."""

import dataclasses
import itertools
from collections.abc import Iterator

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cdlm.sample.draw import State
from cdlm.text.windows import windows

BLANK, PROMPT = -1, 7


@dataclasses.dataclass
class Counter:
    """Fills a window in two hops, first every other position; writes 100 + the number of the window."""

    seen: list[tuple[torch.Tensor, torch.Tensor, int]] = dataclasses.field(default_factory=list)

    def __call__(self, x: torch.Tensor, given: torch.Tensor, number: int) -> Iterator[State]:
        self.seen.append((x, given, number))
        rows = range(len(x))
        yield State(x, 0, 2, [0 for _ in rows])
        odd = torch.arange(x.shape[1]) % 2 == 1
        half = torch.where(given | odd, x, 100 + number)
        yield State(half, 1, 2, [1 + row for row in rows])
        yield State(torch.where(given, half, 100 + number), 2, 2, [2 + row for row in rows])


def start(total: int, prompt: int, batch: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    place = torch.arange(total).expand(batch, -1)
    return torch.where(place < prompt, PROMPT, BLANK), place < prompt


@st.composite
def sizes(draw: st.DrawFn) -> tuple[int, int, int, int]:
    width = draw(st.integers(2, 12))
    total = draw(st.integers(2, 40))
    return total, width, draw(st.integers(1, width - 1)), draw(st.integers(0, total - 1))


@given(sizes())
@settings(max_examples=100, deadline=None)
def test_windows_fill_every_position_once(size: tuple[int, int, int, int]) -> None:
    total, width, block, prompt = size
    x, known = start(total, prompt)
    fill = Counter()
    states = list(windows(fill, x, known, width, block))
    ends = [min(width, total)]
    while ends[-1] < total:
        ends.append(min(ends[-1] + block, total))
    owner = torch.tensor([next(k for k, end in enumerate(ends) if place < end) for place in range(total)])
    assert torch.equal(states[-1].x, torch.where(known, PROMPT, 100 + owner))

    assert [number for _, _, number in fill.seen] == list(range(len(ends)))
    for (piece, context, number), end in zip(fill.seen, ends, strict=True):
        begin = max(0, end - width)
        assert piece.shape == context.shape == (2, end - begin)
        before = torch.arange(begin, end) < (ends[number - 1] if number else 0)
        assert torch.equal(context, known[:, begin:end] | before)
        assert torch.equal(piece, torch.where(context, states[-1].x[:, begin:end], BLANK))


@given(sizes())
@settings(max_examples=50, deadline=None)
def test_steps_and_evaluations_add_up(size: tuple[int, int, int, int]) -> None:
    total, width, block, prompt = size
    fill = Counter()
    states = list(windows(fill, *start(total, prompt), width, block))
    count = len(fill.seen)
    assert [state.step for state in states] == list(range(2 * count + 1))  # only the first window shows its start
    assert states[-1].nfe == [2 * count, 3 * count]
    for one, two in itertools.pairwise(states):
        assert all(a <= b for a, b in zip(one.nfe, two.nfe, strict=True))
        settled = one.x != BLANK
        assert torch.equal(one.x[settled], two.x[settled])
    assert {state.num_steps for state in states} == {2 if count == 1 else None}


def test_a_state_shows_the_whole_text() -> None:
    x, known = start(10, 3)
    shapes = [state.x.shape for state in windows(Counter(), x, known, 4, 2)]
    assert set(shapes) == {x.shape}
    assert torch.equal(x, start(10, 3)[0])  # the caller's tensor is its own


def test_windows_are_filled_only_as_states_are_asked_for() -> None:
    fill = Counter()
    states = windows(fill, *start(20, 0), 8, 4)
    first = next(states)
    assert len(fill.seen) == 1
    assert bool((first.x == BLANK).all())
    for _ in range(2):
        next(states)
    assert len(fill.seen) == 1
    next(states)
    assert len(fill.seen) == 2


def test_a_text_of_one_window_knows_its_steps() -> None:
    assert [state.num_steps for state in windows(Counter(), *start(6, 2), 6, 3)] == [2, 2, 2]
    assert [state.num_steps for state in windows(Counter(), *start(5, 2), 6, 3)] == [2, 2, 2]


def test_a_window_that_is_all_given_is_kept() -> None:
    x, known = start(20, 15)
    last = list(windows(Counter(), x, known, 8, 4))[-1]
    assert torch.equal(last.x[:, :15], x[:, :15])
    assert bool((last.x != BLANK).all())
