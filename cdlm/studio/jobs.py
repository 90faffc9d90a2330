"""The job queue: one thread computes, and jobs take turns, one network evaluation each.

So every client sees progress, a cancelled job stops before its next evaluation, and a client that does not read its
results blocks nobody: its job waits, and is cancelled after a while, sooner if others wait for a turn.
"""

import asyncio
import collections
import contextlib
import secrets
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

BUFFER_SIZE = 64
"""Items of a job that are computed before any is read."""
READ_TIMEOUT = 30.0
"""Seconds after which a job with a full buffer is cancelled."""
READ_TIMEOUT_IF_BUSY = 3.0
"""The same while other jobs wait for its turn."""


class QueueFull(Exception):  # noqa: N818 (an answer, not a fault)
    """The queue takes no further job."""


class Job:
    """Work as an iterator, which runs in the thread of the queue; `items` brings what it yields to the event loop."""

    def __init__(self, work: Callable[[], Iterator[Any]]) -> None:
        self.id = f"cmpl-{secrets.token_hex(12)}"
        self.work = work
        self.running: Iterator[Any] | None = None
        self.buffer: collections.deque[Any] = collections.deque()
        self.error: Exception | None = None
        self.ended = threading.Event()
        self.cancelled = threading.Event()
        self.full_since = 0.0
        """Since when the buffer has been full; 0 if it is not."""
        self._loop = asyncio.get_running_loop()
        self._changed = asyncio.Event()

    def cancel(self) -> None:
        self.cancelled.set()

    def notify(self) -> None:
        """Wake the reader, from another thread."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody reads
            self._loop.call_soon_threadsafe(self._changed.set)

    async def items(self, idle: float = 1.0) -> AsyncIterator[Any]:
        """What the work yields; None after every `idle` seconds without an item. Raises what the work raised."""
        while True:
            self._changed.clear()
            while self.buffer:
                yield self.buffer.popleft()
            if self.ended.is_set() and not self.buffer:
                if self.error is not None:
                    raise self.error
                return
            try:
                await asyncio.wait_for(self._changed.wait(), idle)
            except TimeoutError:
                yield None


class JobQueue:
    """At most `max_concurrent` jobs take turns, at most `max_queue` wait, and further ones are refused."""

    def __init__(self, max_concurrent: int = 4, max_queue: int = 16) -> None:
        self.max_concurrent = max_concurrent
        self.max_queue = max_queue
        self._queued: collections.deque[Job] = collections.deque()
        self._active: list[Job] = []
        self._jobs: dict[str, Job] = {}
        self._change = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="studio jobs", daemon=True)
        self._thread.start()

    @property
    def counts(self) -> tuple[int, int]:
        """Jobs that run, and jobs that wait."""
        with self._change:
            return len(self._active), len(self._queued)

    def check_available(self) -> None:
        """Refuse before a request is prepared what would be refused after it."""
        with self._change:
            if len(self._queued) >= self.max_queue:
                raise QueueFull(f"{len(self._queued)} requests are waiting, and the queue is full")

    def submit(self, work: Callable[[], Iterator[Any]]) -> tuple[Job, int]:
        """Add a job; returns it and the number of jobs that wait before it."""
        job = Job(work)
        with self._change:
            self.check_available()
            ahead = len(self._queued)
            self._queued.append(job)
            self._jobs[job.id] = job
            self._change.notify()
        return job, ahead

    def find(self, job_id: str) -> Job | None:
        with self._change:
            return self._jobs.get(job_id)

    def close(self) -> None:
        """Stop all jobs."""
        with self._change:
            self._closed = True
            self._change.notify()
        self._thread.join(timeout=10)

    def _run(self) -> None:
        while True:
            with self._change:
                while not (self._queued or self._active or self._closed):
                    self._change.wait()
                if self._closed:
                    for job in (*self._active, *self._queued):
                        self._end(job)
                    return
                while self._queued and len(self._active) < self.max_concurrent:
                    self._active.append(self._queued.popleft())
                turn = list(self._active)
            progress = [self._step(job) for job in turn]
            with self._change:
                for job in [*self._active, *self._queued]:
                    if job.cancelled.is_set() and not job.ended.is_set():
                        self._end(job)
                self._active = [job for job in self._active if not job.ended.is_set()]
                self._queued = collections.deque(job for job in self._queued if not job.ended.is_set())
            if not any(progress):
                time.sleep(0.01)

    def _step(self, job: Job) -> bool:
        """Compute one item of a job; returns whether there was anything to do."""
        if job.cancelled.is_set():
            return True
        if len(job.buffer) >= BUFFER_SIZE:
            job.full_since = job.full_since or time.monotonic()
            timeout = min(READ_TIMEOUT_IF_BUSY, READ_TIMEOUT) if self._queued else READ_TIMEOUT
            if time.monotonic() - job.full_since > timeout:
                job.cancel()
            return False
        job.full_since = 0.0
        try:
            if job.running is None:
                job.running = job.work()
            job.buffer.append(next(job.running))
            job.notify()
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
        job.notify()
