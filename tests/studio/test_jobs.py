"""The queue: turns, limits, cancelling, failures, and readers who do not read."""

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest

from cdlm.studio import jobs
from cdlm.studio.jobs import JobQueue, QueueFull


def run(scene: Callable[[JobQueue], Awaitable[None]], **limits: int) -> None:
    async def played() -> None:
        queue = JobQueue(**limits)
        try:
            await asyncio.wait_for(scene(queue), 20)
        finally:
            queue.close()

    asyncio.run(played())


async def everything(job: jobs.Job) -> list[Any]:
    return [item async for item in job.items() if item is not None]


def gate() -> tuple[threading.Event, Callable[[], Iterator[int]]]:
    """Work that waits until it is released."""
    release = threading.Event()

    def slow() -> Iterator[int]:
        release.wait(5)
        yield 1

    return release, slow


def test_jobs_take_turns() -> None:
    order: list[str] = []
    release, slow = gate()

    def work(name: str) -> Iterator[int]:
        for number in range(5):
            order.append(name)
            yield number

    async def scene(queue: JobQueue) -> None:
        first, _ = queue.submit(slow)
        while queue.counts != (1, 0):
            await asyncio.sleep(0.01)
        both = [queue.submit(lambda name=name: work(name))[0] for name in "ab"]  # both wait until the first is released
        release.set()
        assert [await everything(job) for job in (first, *both)] == [[1], list(range(5)), list(range(5))]
        while queue.counts != (0, 0):
            await asyncio.sleep(0.01)

    run(scene, max_concurrent=3)
    assert "".join(order) == "ab" * 5


def test_the_next_is_refused_and_positions_are_told() -> None:
    release, slow = gate()

    async def scene(queue: JobQueue) -> None:
        first, _ = queue.submit(slow)
        while queue.counts != (1, 0):
            await asyncio.sleep(0.01)
        waiting = [queue.submit(slow) for _ in range(2)]
        assert [ahead for _, ahead in waiting] == [0, 1]
        with pytest.raises(QueueFull, match="2 requests are waiting"):
            queue.submit(slow)
        release.set()
        for job in (first, *(job for job, _ in waiting)):
            assert await everything(job) == [1]

    run(scene, max_concurrent=1, max_queue=2)


def test_cancelled_work_stops_before_its_next_item() -> None:
    made, closed = [], threading.Event()

    def endless() -> Iterator[int]:
        try:
            while True:
                made.append(time.monotonic())
                yield len(made)
                time.sleep(0.005)
        finally:
            closed.set()

    async def scene(queue: JobQueue) -> None:
        job, _ = queue.submit(endless)
        async for item in job.items():
            if item == 3:
                assert queue.find(job.id) is job
                job.cancel()
        assert closed.wait(2)
        count = len(made)
        await asyncio.sleep(0.1)
        assert len(made) == count
        assert queue.find(job.id) is None

    run(scene)


def test_a_job_that_waits_can_be_cancelled() -> None:
    release, slow = gate()

    async def scene(queue: JobQueue) -> None:
        first, _ = queue.submit(slow)
        second, _ = queue.submit(slow)
        second.cancel()
        release.set()
        assert await everything(first) == [1]
        assert await everything(second) == []

    run(scene, max_concurrent=1)


def test_a_failure_reaches_its_reader_alone() -> None:
    def bad() -> Iterator[int]:
        yield 1
        raise ValueError("no such thing")

    async def scene(queue: JobQueue) -> None:
        job, _ = queue.submit(bad)
        with pytest.raises(ValueError, match="no such thing"):
            await everything(job)
        other, _ = queue.submit(lambda: iter([7]))
        assert await everything(other) == [7]

    run(scene)


def test_who_does_not_read_holds_up_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "BUFFER_SIZE", 4)
    monkeypatch.setattr(jobs, "READ_TIMEOUT", 0.3)
    made: list[int] = []

    def many() -> Iterator[int]:
        for number in range(1000):
            made.append(number)
            yield number

    async def scene(queue: JobQueue) -> None:
        idle, _ = queue.submit(many)
        assert await everything(queue.submit(lambda: iter(range(50)))[0]) == list(range(50))
        assert len(made) == 4  # it waits for its reader
        await asyncio.sleep(0.6)
        assert queue.counts == (0, 0)  # and is given up
        assert idle.cancelled.is_set()

    run(scene)


def test_who_does_not_read_goes_sooner_if_others_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "BUFFER_SIZE", 4)
    monkeypatch.setattr(jobs, "READ_TIMEOUT_IF_BUSY", 0.2)

    async def scene(queue: JobQueue) -> None:
        deaf = [queue.submit(lambda: iter(range(1000)))[0] for _ in range(queue.max_concurrent)]
        await asyncio.sleep(0.4)
        assert not any(job.cancelled.is_set() for job in deaf)  # nobody wants their places
        assert await everything(queue.submit(lambda: iter(range(50)))[0]) == list(range(50))
        assert any(job.cancelled.is_set() for job in deaf)

    run(scene)


def test_silence_is_told() -> None:
    def slow() -> Iterator[int]:
        time.sleep(0.3)
        yield 1

    async def scene(queue: JobQueue) -> None:
        job, _ = queue.submit(slow)
        found = [item async for item in job.items(idle=0.05)]
        assert found[-1] == 1
        assert None in found[:-1]

    run(scene)


def test_closing_ends_all() -> None:
    async def scene(queue: JobQueue) -> None:
        job, _ = queue.submit(lambda: iter(range(10**9)))
        queue.close()
        assert len(await everything(job)) <= jobs.BUFFER_SIZE
        assert not queue._thread.is_alive()

    run(scene)
