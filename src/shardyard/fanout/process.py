"""`FanoutProcess`: runs a coordinator or a worker as the mode calls for it, and starts and stops it with the mode."""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Protocol, Self

from shardyard.fanout.bounded_log import bounded
from shardyard.fanout.config import DEFAULT_CONFIG, WORKERS_GROUP, FanoutConfig
from shardyard.fanout.migration import LOOK_SECONDS, PROCESSES_GROUP, Migration, Progress
from shardyard.fanout.modes import WATCH_NAME, ModeState, Plan, Role, plan_of
from shardyard.groups import GroupConfig, JoinRequest, Membership, MembershipListener, Node
from shardyard.model import Partition, RetryLater, ShardyardError
from shardyard.registry import ChangeSignal
from shardyard.runtime.clock import timeout

_log = logging.getLogger(__name__)

IDLE_SECONDS = 5.0
"""The longest time between two looks at the mode, also when no change was signalled."""
MIGRATING_SECONDS = 0.5
"""The same during a migration. Whoever began it looks more often."""
RESTART_SECONDS = 1.0
"""Before a part that has failed is started again."""


class Part(Protocol):
    """A coordinator or a worker. It works from entering the block to leaving it, and leaves nothing unfinished that is
    in flight."""

    @property
    def owned(self) -> set[Partition]: ...

    def is_in_touch(self) -> bool: ...

    async def failure(self) -> None:
        """Wait for the error that ends its work, and raise it."""

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class FanoutProcess:
    """A process among the coordinators and workers, from entering the block to leaving it.

    It is present in the group `fanout.processes` with its role and address, in every mode. A worker is in the group
    `fanout.workers`, too, also while it owns nothing of `fanout`: that is where messaging servers find workers. If a
    migration is under way, it helps to carry it out.
    """

    def __init__(
        self,
        node: Node,
        role: Role,
        make: Callable[[Plan, Node], Part],
        *,
        address: str | None = None,
        config: FanoutConfig = DEFAULT_CONFIG,
        metadata: Mapping[str, object] | None = None,
    ) -> None:
        """`make` makes the part for a plan, on a host. `metadata`: for others, beside the role."""
        self.node = node
        self.role = role
        self.address = address
        self.progress = Progress(ModeState(), "")
        """The mode as last seen."""
        self._make = make
        self._config = config
        self._metadata = {**(metadata or {}), "role": role}
        self._migration = Migration(node.log, node.registry, node.transactions, node.clock, node.name)
        self._plan: Plan | None = None
        self._part: Part | None = None
        self._watching: asyncio.Task[None] | None = None
        self._failed = asyncio.Event()
        self._present: Membership | None = None
        """In the group of the workers, while it is no working member of it."""
        self._is_settled = False
        self._is_stopping = False
        self._stack = contextlib.AsyncExitStack()
        self._task: asyncio.Task[None] | None = None

    @property
    def part(self) -> Part | None:
        """What works now; None if the process stands by."""
        return self._part

    @property
    def plan(self) -> Plan | None:
        return self._plan

    @property
    def is_ready(self) -> bool:
        """Whether it does what the mode calls for, which may be to stand by, and is in touch with its group."""
        return self._is_settled and not self._is_stopping and (self._part is None or self._part.is_in_touch())

    async def __aenter__(self) -> Self:
        request = JoinRequest(
            PROCESSES_GROUP,
            self.node.name,
            session_timeout=self._config.session_timeout,
            address=self.address,
            metadata=self._metadata,
        )
        await self._stack.enter_async_context(Membership(self.node, request, MembershipListener()))
        try:
            self.progress = Progress(await self._migration.state(), "")
            await self._follow(self.progress.state)
        except BaseException:
            await self.stop()
            raise
        self._task = asyncio.create_task(self._run(), name=f"mode of {self.node.name}")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    async def stop(self) -> None:
        """Finish what is in flight, and leave all groups. May be called twice."""
        self._is_stopping = True
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        try:
            await self._stop_part()
        finally:
            await self._stack.aclose()

    # Following the mode

    async def _run(self) -> None:
        warned = ""
        with ChangeSignal(self.node.registry, WATCH_NAME, self.node.clock) as changes:
            while True:
                seconds = IDLE_SECONDS
                try:
                    self.progress = await self._migration.step()
                    await self._follow(self.progress.state)
                    if self.progress.state.is_migrating:
                        seconds = MIGRATING_SECONDS
                    warned = ""
                except ShardyardError as error:
                    if str(error) != warned:  # once, not every second
                        level = logging.WARNING if isinstance(error, RetryLater) else logging.ERROR
                        _log.log(level, "this %s tries again to do what the mode calls for: %s", self.role, error)
                    warned = str(error)
                    seconds = RESTART_SECONDS
                except Exception:  # noqa: BLE001 nobody awaits this task, and without it the mode is not followed
                    _log.exception("this %s tries again to do what the mode calls for", self.role)
                    seconds = RESTART_SECONDS
                await self._wait(changes, seconds)

    async def _wait(self, changes: ChangeSignal, seconds: float) -> None:
        """Until the mode may have changed, the part has failed, or some time has passed."""
        waits = [asyncio.ensure_future(changes.wait(seconds)), asyncio.ensure_future(self._failed.wait())]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
            await asyncio.gather(*waits, return_exceptions=True)
        if self._failed.is_set():
            await self._stop_part()
            await self.node.clock.sleep(RESTART_SECONDS)

    async def _follow(self, state: ModeState) -> None:
        plan = plan_of(self.role, state)
        if self._is_settled and plan == self._plan:
            return
        await self._stop_part()
        _log.info("the mode is %s (%s): %s", state.mode, state.phase, _description(plan))
        if self.role == "worker" and (plan is None or plan.kind != "worker"):
            self._present = await self._join_workers()
        if plan is not None:
            host = self.node if plan.until is None else bounded(self.node, plan.until)
            part = self._make(plan, host)
            await part.__aenter__()
            self._part = part
            self._watching = asyncio.create_task(self._watch(part), name=f"watching {self.node.name}")
        self._plan, self._is_settled = plan, True
        # The mode may have changed since it was read: then nobody waits for this process to leave its group.
        if (now := await self._migration.state()).version != state.version:
            await self._follow(now)

    async def _join_workers(self) -> Membership:
        request = JoinRequest(
            WORKERS_GROUP,
            self.node.name,
            session_timeout=self._config.session_timeout,
            address=self.address,
            metadata=self._metadata,
            config=GroupConfig(self._config.assignor),
        )
        return await Membership(self.node, request, MembershipListener()).__aenter__()

    async def _watch(self, part: Part) -> None:
        try:
            await part.failure()
        except ShardyardError as error:
            _log.error("this %s has ended, and is started again: %s", self.role, error)
        except Exception:  # noqa: BLE001 whatever it is, it is started again
            _log.exception("this %s has failed, and is started again", self.role)
        self._failed.set()

    async def _stop_part(self) -> None:
        """Stop what works now, and be no member of its group any more."""
        part, self._part = self._part, None
        present, self._present = self._present, None
        watching, self._watching = self._watching, None
        self._is_settled = False
        self._failed.clear()
        if watching is not None:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
        for member in (part, present):
            if member is not None:
                try:
                    await member.__aexit__(None, None, None)
                except ShardyardError as error:  # its session expires, then
                    _log.warning("this %s could not leave its group: %s", self.role, error)
                except Exception:  # noqa: BLE001 the other one leaves all the same
                    _log.exception("this %s could not leave its group", self.role)

    async def settled(self, seconds: float) -> None:
        """Wait until it is ready, up to a time."""
        with contextlib.suppress(TimeoutError):
            async with timeout(self.node.clock, seconds):
                while not self.is_ready:
                    await self.node.clock.sleep(LOOK_SECONDS)


def _description(plan: Plan | None) -> str:
    if plan is None:
        return "standing by"
    what = {"coordinator": "coordinating", "worker": "serving a share of the channels", "replicated": "serving all"}
    return what[plan.kind] + ("" if plan.until is None else ", up to where the migration began")
