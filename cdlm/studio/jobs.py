"""Who writes when: one thread computes, and the jobs of all visitors take turns, one evaluation of the network each.

So everyone sees progress, a cancelled job stops before its next evaluation, and a visitor who does not read what is
written for them holds up nobody: their job waits, and after a while it is given up, sooner if others wait for a turn.
"""

import asyncio
import collections
import contextlib
import secrets
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

AHEAD = 64
"""Items that are written before anyone has read them."""
PATIENCE = 30.0
"""Seconds that a job waits for a reader."""
HASTE = 3.0
"""And if others wait for its place."""


class Full(Exception):  # noqa: N818 (an answer, not a fault)
    """There is no room for another job."""


class Job:
    """Work as an iterator of items, done elsewhere; `items` brings them here."""

    def __init__(self, work: Callable[[], Iterator[Any]]) -> None:
        self.id = secrets.token_hex(8)
        self.work = work
        self.running: Iterator[Any] | None = None
        self.ready: collections.deque[Any] = collections.deque()
        self.error: Exception | None = None
        self.ended = threading.Event()
        self.cancelled = threading.Event()
        self.unread = 0.0
        """Since when nothing was read, while there was too much to read."""
        self._loop = asyncio.get_running_loop()
        self._bell = asyncio.Event()

    def cancel(self) -> None:
        self.cancelled.set()

    def ring(self) -> None:
        """Tell the reader, from another thread, that there is something new."""
        with contextlib.suppress(RuntimeError):  # the loop has closed: nobody listens
            self._loop.call_soon_threadsafe(self._bell.set)

    async def items(self, idle: float = 1.0) -> AsyncIterator[Any]:
        """What the work yields; None whenever nothing has come for a while. Raises what the work raised."""
        while True:
            self._bell.clear()
            while self.ready:
                yield self.ready.popleft()
            if self.ended.is_set() and not self.ready:
                if self.error is not None:
                    raise self.error
                return
            try:
                await asyncio.wait_for(self._bell.wait(), idle)
            except TimeoutError:
                yield None


class Desk:
    """The queue: so many jobs take turns, so many wait, and the next one is refused."""

    def __init__(self, at_once: int = 4, waiting: int = 16) -> None:
        self.at_once, self.most = at_once, waiting
        self._waiting: collections.deque[Job] = collections.deque()
        self._active: list[Job] = []
        self._jobs: dict[str, Job] = {}
        self._change = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="studio desk", daemon=True)
        self._thread.start()

    @property
    def counts(self) -> tuple[int, int]:
        """Jobs that run, and jobs that wait."""
        with self._change:
            return len(self._active), len(self._waiting)

    def check_room(self) -> None:
        """Refuse now what would be refused after it was prepared."""
        with self._change:
            if len(self._waiting) >= self.most:
                raise Full(f"{len(self._waiting)} texts are waiting to be written, and there is room for no more")

    def submit(self, work: Callable[[], Iterator[Any]]) -> tuple[Job, int]:
        """Add a job; returns it and how many are before it."""
        job = Job(work)
        with self._change:
            self.check_room()
            ahead = len(self._waiting)
            self._waiting.append(job)
            self._jobs[job.id] = job
            self._change.notify()
        return job, ahead

    def find(self, name: str) -> Job | None:
        with self._change:
            return self._jobs.get(name)

    def close(self) -> None:
        """Stop all work."""
        with self._change:
            self._closed = True
            self._change.notify()
        self._thread.join(timeout=10)

    def _run(self) -> None:
        while True:
            with self._change:
                while not (self._waiting or self._active or self._closed):
                    self._change.wait()
                if self._closed:
                    for job in (*self._active, *self._waiting):
                        self._end(job)
                    return
                while self._waiting and len(self._active) < self.at_once:
                    self._active.append(self._waiting.popleft())
                turn = list(self._active)
            progress = [self._step(job) for job in turn]
            with self._change:
                for job in [*self._active, *self._waiting]:
                    if job.cancelled.is_set() and not job.ended.is_set():
                        self._end(job)
                self._active = [job for job in self._active if not job.ended.is_set()]
                self._waiting = collections.deque(job for job in self._waiting if not job.ended.is_set())
            if not any(progress):
                time.sleep(0.01)

    def _step(self, job: Job) -> bool:
        """One item of a job; whether there was anything to do."""
        if job.cancelled.is_set():
            return True
        if len(job.ready) >= AHEAD:
            job.unread = job.unread or time.monotonic()
            if time.monotonic() - job.unread > (min(HASTE, PATIENCE) if self._waiting else PATIENCE):
                job.cancel()
            return False
        job.unread = 0.0
        try:
            if job.running is None:
                job.running = job.work()
            job.ready.append(next(job.running))
            job.ring()
        except StopIteration:
            self._end(job)
        except Exception as error:
            job.error = error
            self._end(job)
        return True

    def _end(self, job: Job) -> None:
        close = getattr(job.running, "close", None)
        if close is not None:
            with contextlib.suppress(Exception):
                close()
        job.running = None
        with self._change:
            self._jobs.pop(job.id, None)
        job.ended.set()
        job.ring()
