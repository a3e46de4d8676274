"""Group commit: one thread carries out what is waiting together in one go, for the price of one sync to disk."""

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

from shardyard.model.errors import Closed, ShardyardError
from shardyard.runtime.metrics import GROUP_COMMIT_UNITS

_log = logging.getLogger(__name__)
Work = TypeVar("Work")
Outcome = Any
"""The result of a unit of work, or the error that it raised."""

_ENOUGH_BYTES = 1024 * 1024
"""A group of this size does not wait for more: what it takes to begin and to end it is little by comparison."""
_MAX_SKIPPED = 63
"""Groups."""
SHORT_SECONDS = 0.001
"""How long commits may take in an event loop, on average."""
MOST_SECONDS = 4 * SHORT_SECONDS
"""What a stall counts for at most if it is rare."""
AVERAGED_COMMITS = 16
DECAY_COMMITS = 256
"""How slowly an average that is too long is forgotten while a thread commits, until the event loop is tried again."""
RARE_COMMITS = 256
"""A stall is rare if it is the only one of so many commits in the event loop."""


class GroupCommit(Generic[Work]):
    """Takes work from an event loop and carries it out in groups. A group is what arrived while the last one was
    carried out, and what its callers submit as soon as they have their results.

    `carry_out` gets a group and returns an outcome for each unit. A unit that fails has an error as its outcome and
    changes nothing. `carry_out` itself raises only if nothing of the group was done, or a `ShardyardError` that says
    otherwise. If the error is not a `ShardyardError`, the units are tried one by one, so that a bad unit fails alone.
    Work whose caller was cancelled before it started is skipped.
    """

    def __init__(
        self,
        name: str,
        carry_out: Callable[[list[Work]], list[Outcome]],
        *,
        most: int,
        most_bytes: int = 2**62,
        linger: float = 0.0,
    ) -> None:
        """`most`, `most_bytes`: the limits of a group. `linger`: the most seconds to wait for the callers of the last
        group to submit again. It never waits longer than the last group took, and seldom if they do not come back."""
        self._name = name
        self._carry_out = carry_out
        self._most = most
        self._most_bytes = most_bytes
        self._linger = linger
        self._waiting: deque[tuple[Work, asyncio.Future[Any], int]] = deque()
        self._wake = threading.Condition()
        self._wanted = 1
        """How many units the thread waits for; 0 while it does not wait."""
        self._expected = 0
        """How many units will wait if all callers of the last group submit again."""
        self._linger_until = 0.0
        """On the monotonic clock."""
        self._skip = 0
        """The number of groups for which it does not wait after it has waited in vain: 1, then 3, 7 and so on."""
        self._skipped = 0
        self._closing = False
        self.waiting_bytes = 0
        """The size of the work that has not started."""
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    async def do(self, work: Work, size: int = 0) -> Any:
        """Submit work. Returns its result when the whole group has been carried out."""
        result: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.submit(work, result, size)
        return await result

    def submit(self, work: Work, result: "asyncio.Future[Any]", size: int = 0) -> None:
        """The same, for a caller that has the future for the result already."""
        with self._wake:
            if self._closing:
                raise Closed(self._name)
            self._waiting.append((work, result, size))
            self.waiting_bytes += size
            if self._wanted and self._is_enough():
                self._wake.notify()

    def close(self) -> None:
        """Carry out what was submitted, then stop the thread."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        self._thread.join()

    def _run(self) -> None:
        while group := self._next_group():
            wanted = [(work, result) for work, result in group if not result.done()]
            if wanted:
                GROUP_COMMIT_UNITS.observe(len(wanted))
                started = time.monotonic()
                outcomes = outcomes_of(self._name, self._carry_out, [work for work, _ in wanted])
                ended = time.monotonic()
                self._expected = min(len(self._waiting) + len(wanted), self._most)
                self._linger_until = ended + min(ended - started, self._linger)
                _deliver([result for _, result in wanted], outcomes)

    def _next_group(self) -> list[tuple[Work, "asyncio.Future[Any]"]]:
        group: list[tuple[Work, asyncio.Future[Any]]] = []
        size = 0
        with self._wake:
            self._wait_for_group()
            while (
                self._waiting
                and len(group) < self._most
                and (not group or size + self._waiting[0][2] <= self._most_bytes)
            ):
                work, result, bytes_ = self._waiting.popleft()
                group.append((work, result))
                size += bytes_
            self.waiting_bytes -= size
        return group

    def _wait_for_group(self) -> None:
        """Until there is work; and for a moment until all callers that just got their results have submitted again. The
        thread is not woken for each of them, because it would take the interpreter from them each time."""
        if self._expected > 1 and self._linger:
            if self._skipped < self._skip:
                self._skipped += 1
            else:
                self._wait_for_callers()
        self._wanted = 1
        while not self._is_enough():
            self._wake.wait()
        self._wanted = 0

    def _wait_for_callers(self) -> None:
        self._wanted = self._expected
        while not self._is_enough() and (left := self._linger_until - time.monotonic()) > 0:
            self._wake.wait(left)
        self._skip = 0 if self._is_enough() else min(2 * self._skip + 1, _MAX_SKIPPED)
        self._skipped = 0

    def _is_enough(self) -> bool:
        return len(self._waiting) >= self._wanted or self.waiting_bytes >= _ENOUGH_BYTES or self._closing


class Interrupted(RuntimeError):
    """What a caller gets whose work was interrupted in the event loop, such as by Ctrl-C. It may have been done."""


class CommitTimes:
    """How long the last commits in an event loop took. As long as a disk is quick, it takes longer to leave a commit to
    a thread, and to hear from it, than to make it in the event loop."""

    def __init__(self) -> None:
        self._average = 0.0
        self._since_stall = RARE_COMMITS
        """Commits since the last one that took more than `MOST_SECONDS`."""

    def took(self, seconds: float) -> None:
        """A commit in the event loop took so long, whether or not it succeeded. A rare stall counts for no more than
        `MOST_SECONDS`: that a disk stalls for once says nothing about the next commits. One that stalls again and again
        would stop the event loop each time."""
        self._since_stall += 1
        if seconds > MOST_SECONDS:
            is_rare, self._since_stall = self._since_stall > RARE_COMMITS, 0
            seconds = MOST_SECONDS if is_rare else seconds
        self._average += (seconds - self._average) / AVERAGED_COMMITS

    def decay(self) -> None:
        """A commit was left to a thread. Only those in the event loop tell how quick the disk is, because a thread also
        waits for the interpreter: after some, it is tried again."""
        self._average -= self._average / DECAY_COMMITS

    @property
    def are_short(self) -> bool:
        return self._average < SHORT_SECONDS


def outcomes_of(name: str, carry_out: Callable[[list[Work]], list[Outcome]], works: list[Work]) -> list[Outcome]:
    """What `carry_out` returns for a group, or the errors that it raises; see `GroupCommit`. `name`: for messages."""
    try:
        return carry_out(works)
    except ShardyardError as error:
        return [error] * len(works)
    except Exception as error:  # noqa: BLE001 whatever it is, the callers must get it and the thread must survive
        if len(works) > 1:
            return [outcomes_of(name, carry_out, [work])[0] for work in works]
        _log.exception("%s failed unexpectedly", name)
        return [error]


def after_commit(step: Callable[[], object]) -> None:
    """Run what follows a commit, such as notifications. An error is logged and not raised: the group is durable, and
    must not be carried out again."""
    try:
        step()
    except Exception:  # noqa: BLE001 whatever it is, the commit stands
        _log.exception("what follows a commit failed; the commit itself is durable")


def settle(results: Sequence["asyncio.Future[Any]"], outcomes: Sequence[Outcome]) -> None:
    """Give the callers their results or errors. Called in the event loop."""
    for result, outcome in zip(results, outcomes, strict=True):
        if result.done():  # its caller was cancelled
            continue
        if isinstance(outcome, BaseException):
            result.set_exception(outcome)
        else:
            result.set_result(outcome)


def _deliver(results: list["asyncio.Future[Any]"], outcomes: list[Outcome]) -> None:
    """Hand the outcomes to the event loop that waits for them, all in one callback."""
    try:
        results[0].get_loop().call_soon_threadsafe(settle, results, outcomes)
    except RuntimeError:  # the loop is closed, and nobody waits any more
        _log.debug("a result of %d units came after its event loop was closed", len(results))
