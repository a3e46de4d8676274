"""Carrying out a migration from one mode to the other: when a phase is over, and what it waits for."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from msgspec.structs import replace

from shardyard.fanout.config import EVENTS_GROUP, WORKERS_GROUP
from shardyard.fanout.modes import WATCH_NAME, Mode, ModeState, advance, begin_migration, read_state
from shardyard.log import Log
from shardyard.model import Conflict, Position, RetryLater, Span, UnknownTopic
from shardyard.registry import ChangeSignal, Registry, Snapshot, TransactionBatcher
from shardyard.runtime.clock import Clock
from shardyard.wire.channels import EVENTS, FANOUT

LOOK_SECONDS = 0.1
"""How often to look whether a phase is over."""
PROCESSES_GROUP = "fanout.processes"
"""Whose members are all coordinators and workers, whatever the mode. They own nothing."""


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a migration is."""

    state: ModeState
    waits_for: str
    """What has to happen before the next phase, for people; empty if no migration is under way."""


class MigrationTimeout(RetryLater):
    """Raised when a migration takes longer than its caller waits. It goes on by itself."""

    def __init__(self, progress: Progress, seconds: float) -> None:
        super().__init__(
            f"the migration to {progress.state.to} is not done after {seconds:g} s: it is {progress.state.phase}, and "
            f"waits for {progress.waits_for}; it goes on by itself, and the same call follows it again"
        )
        self.progress = progress


class Migration:
    """Sees to migrations. Any number of processes may do so at the same time."""

    def __init__(self, log: Log, registry: Registry, transactions: TransactionBatcher, clock: Clock, who: str) -> None:
        """`who`: for the audit log."""
        self._log = log
        self._registry = registry
        self._transactions = transactions
        self._clock = clock
        self._who = who

    async def state(self) -> ModeState:
        return await self._transactions.read(read_state)

    async def look(self) -> Progress:
        """The state, and what a migration that is under way waits for. Nothing is changed."""
        state = await self.state()
        waits_for = (await self._look(state))[0] if state.is_migrating else ""
        return Progress(state, waits_for or ("the next phase" if state.is_migrating else ""))

    async def step(self) -> Progress:
        """Begin the next phase if the current one is over. Returns the state then, and what it waits for."""
        while True:
            state = await self.state()
            if not state.is_migrating:
                return Progress(state, "")
            waits_for, following = await self._look(state)
            if following is None:
                return Progress(state, waits_for)
            await self._transactions.run(partial(advance, before=state, after=following, who=self._who))

    async def migrate(
        self,
        to: Mode,
        *,
        seconds: float,
        progress: Callable[[Progress], None] = lambda _: None,
        force: bool = False,
    ) -> ModeState:
        """Migrate to a mode, and return when it is done. See `modes.begin_migration` for one that is under way.

        `progress` is called with every change of the state or of what it waits for. `MigrationTimeout` when `seconds`
        are over. `Conflict` if no process runs that the mode needs, unless `force` is set: then nothing would
        be delivered. If the caller is cancelled or killed, the coordinators and workers that run finish it.
        """
        if not force:
            await self._check_processes(to)
        await self._transactions.run(lambda tx: begin_migration(tx, to, self._who))
        deadline = self._clock.monotonic() + seconds
        last: Progress | None = None
        with ChangeSignal(self._registry, WATCH_NAME, self._clock) as changes:
            while True:
                now = await self.step()
                if now != last:
                    progress(now)
                    last = now
                if not now.state.is_migrating:
                    if now.state.mode != to:
                        raise Conflict(f"the migration to {to} was cancelled: the mode is {now.state.mode}")
                    return now.state
                if self._clock.monotonic() >= deadline:
                    raise MigrationTimeout(now, seconds)
                await changes.wait(LOOK_SECONDS)

    async def _check_processes(self, to: Mode) -> None:
        state, roles = await self._transactions.read(lambda tx: (read_state(tx), _roles(tx)))
        if to in (state.to, state.mode):  # it is the mode, or leads there, or is cancelled
            return
        if to == "partitioned" and "coordinator" not in roles:
            raise Conflict("no coordinator is running, and without one nothing would be delivered: start one first")
        if "worker" not in roles:
            raise Conflict("no fan-out worker is running, and without one nothing would be delivered: start one first")

    async def _look(self, state: ModeState) -> tuple[str, ModeState | None]:
        """What the phase waits for, or the state that follows."""
        following: ModeState | None = ModeState(state.to or state.mode)
        waits_for = ""
        if state.phase == "pausing":
            if readers := await self._transactions.read(_readers):
                waits_for = f"{_count(len(readers), 'process', 'processes')} to stop reading {EVENTS}"
            else:
                until = {index: (span.epoch, span.end) for index, span in (await self._spans(EVENTS)).items()}
                following = replace(state, phase="finishing", until=until)
        elif state.phase == "finishing":
            if left := await self._unread(state):
                role = "coordinator" if state.mode == "partitioned" else "fan-out worker"
                waits_for = f"a {role} to forward {_count(left, 'record')} of {EVENTS}"
            elif state.mode == "partitioned":
                following = ModeState(state.mode, state.to, "draining")
        elif left := await self._unprocessed():
            waits_for = f"fan-out workers to process {_count(left, 'record')} of {FANOUT}"
        return waits_for, None if waits_for else following

    async def _spans(self, topic: str) -> dict[int, Span]:
        try:
            return await self._log.ends(topic)
        except UnknownTopic:
            return {}

    async def _unread(self, state: ModeState) -> int:
        """Records of `events` that the old mode has to forward yet."""
        spans = await self._spans(EVENTS)
        committed = await self._transactions.read(lambda tx: committed_positions(tx, EVENTS_GROUP, EVENTS))
        left = 0
        for index, (epoch, end) in state.until.items():
            span = spans.get(index)
            if span is not None and span.epoch == epoch:
                left += offsets_behind(committed.get(index), Span(span.epoch, span.first, end))
        return left

    async def _unprocessed(self) -> int:
        """Records of `fanout` that no worker has processed yet."""
        spans = await self._spans(FANOUT)
        committed = await self._transactions.read(lambda tx: committed_positions(tx, WORKERS_GROUP, FANOUT))
        return sum(offsets_behind(committed.get(index), span) for index, span in spans.items())


def committed_positions(tx: Snapshot, group: str, topic: str) -> dict[int, Position]:
    """How far a group got on each partition of a topic."""
    rows = tx.ownerships(group)
    return {row.partition.index: row.committed for row in rows if row.committed and row.partition.topic == topic}


def offsets_behind(committed: Position | None, span: Span) -> int:
    """The offsets of a partition that are not committed; there may be fewer records."""
    start = committed.offset if committed is not None and committed.epoch == span.epoch else span.first
    return max(span.end - max(start, span.first), 0)


def _readers(tx: Snapshot) -> list[str]:
    """Who may read `events`."""
    return [row.name for row in tx.members(EVENTS_GROUP) if row.topics and row.expires_at > tx.now]


def _roles(tx: Snapshot) -> set[str]:
    """Of the processes that run."""
    rows = [row for row in tx.members(PROCESSES_GROUP) if row.expires_at > tx.now]
    return {str(row.metadata.get("role")) for row in rows if isinstance(row.metadata, dict)}


def _count(number: int, one: str, many: str | None = None) -> str:
    return f"{number} {one if number == 1 else many or one + 's'}"
