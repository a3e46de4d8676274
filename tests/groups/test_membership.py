"""Membership and directory on the embedded engines and on their twins: events, preparation, presence, addresses."""

import asyncio
import contextlib
import logging
import math
from collections.abc import Callable, Sequence

import pytest

from shardyard.groups import (
    Directory,
    Grant,
    GroupConfig,
    JoinRequest,
    Membership,
    MembershipListener,
    Node,
    configure,
    membership,
    protocol,
)
from shardyard.groups.coordinator import LocalCoordinator, MemberIdentity
from shardyard.model import Busy, Fenced, InvalidCall, OutcomeUnknown, Partition, Position
from shardyard.registry import Heartbeat, Snapshot, Transaction
from tests.groups.test_reader import TOPIC, Environment, Run, evict, run, run_by_hand
from tests.registry.blocks import transaction

__all__ = ["run", "run_by_hand"]  # the fixtures

GROUP = "billing"


class Recorder(MembershipListener):
    """Keeps the events, and releases what is revoked if it is to."""

    def __init__(self) -> None:
        self.events: list[tuple[str, int]] = []
        self.owned: dict[Partition, Grant] = {}
        self.coming: set[Partition] = set()
        self.error: BaseException | None = None

    def incoming(self, partition: Partition) -> None:
        self.events.append(("incoming", partition.index))
        self.coming.add(partition)

    def assigned(self, partition: Partition, grant: Grant) -> None:
        self.events.append(("assigned", partition.index))
        self.owned[partition] = grant
        self.coming.discard(partition)

    def revoked(self, partition: Partition) -> None:
        self.events.append(("revoked", partition.index))

    def lost(self, partition: Partition) -> None:
        self.events.append(("lost", partition.index))
        self.owned.pop(partition, None)
        self.coming.discard(partition)

    def failed(self, error: BaseException) -> None:
        self.error = error

    def seen(self, kind: str) -> set[int]:
        return {index for event, index in self.events if event == kind}


def member(env: Environment, name: str, listener: MembershipListener, **options: object) -> Membership:
    request = JoinRequest(GROUP, name, **{"topics": [TOPIC], "session_timeout": 2.0, **options})  # type: ignore[arg-type]
    return Membership(env.node, request, listener)


async def until(env: Environment, condition: Callable[[], bool]) -> None:
    async def met() -> bool:
        return condition()

    await env.until(met)


def test_a_member_learns_what_it_owns_what_it_must_release_and_what_it_lost(run: Run) -> None:
    async def scenario(env: Environment) -> None:
        first, second = Recorder(), Recorder()
        async with member(env, "a", first) as a:
            await until(env, lambda: first.seen("assigned") == {0, 1, 2, 3})
            async with member(env, "b", second):
                await until(env, lambda: len(first.seen("revoked")) == 2)
                assert second.events == [], "nothing moves before it is released"
                moving = first.seen("revoked")
                for index in moving:
                    await a.release(Partition(TOPIC, index))
                await until(env, lambda: second.seen("assigned") == moving)
                assert set(a.owned) == {Partition(TOPIC, i) for i in range(4) if i not in moving}
            env.registry.run(lambda tx: evict(tx, GROUP, "a"))
            await until(env, lambda: bool(first.seen("lost")))
            await until(env, lambda: len(first.owned) == 4)  # it joined again by itself

    run(scenario)


def test_a_member_commits_as_the_owner_and_only_as_the_owner(run: Run) -> None:
    async def scenario(env: Environment) -> None:
        listener = Recorder()
        async with member(env, "a", listener) as a:
            await until(env, lambda: len(listener.owned) == 4)
            partition, grant = next(iter(listener.owned.items()))
            epoch = (await env.log.topic(TOPIC)).epoch
            await a.commit({partition: (grant.epoch, Position(epoch, 0))})
            with pytest.raises(Fenced):
                await a.commit({partition: (grant.epoch - 1, Position(epoch, 0))})

    run(scenario)


def test_a_member_that_prepares_gets_a_partition_when_it_is_ready_and_the_owner_continues_until_then(
    run: Run,
) -> None:
    async def scenario(env: Environment) -> None:
        first, second = Recorder(), Recorder()
        async with member(env, "a", first) as a:
            await until(env, lambda: len(first.owned) == 4)
            async with member(env, "b", second, prepare_seconds=60.0) as b:
                await until(env, lambda: len(second.coming) == 2)
                assert (first.seen("revoked"), second.owned) == (set(), {})
                ready, waiting = sorted(second.coming)
                await b.ready(ready)
                await until(env, lambda: first.seen("revoked") == {ready.index})
                await a.release(ready)
                await until(env, lambda: set(second.owned) == {ready})
                assert second.coming == {waiting}
            await until(env, lambda: len(first.owned) == 4)
            assert waiting.index not in first.seen("lost"), "what was only being prepared never left its owner"

    run(scenario)


@pytest.mark.parametrize("static", [True, False])
def test_a_member_whose_join_was_carried_out_without_a_response_joins_again(
    run: Run, monkeypatch: pytest.MonkeyPatch, static: bool
) -> None:
    join = LocalCoordinator.join
    lost: list[MemberIdentity] = []

    async def lose_the_first_response(
        self: LocalCoordinator, request: JoinRequest, since: int | None
    ) -> MemberIdentity:
        identity = await join(self, request, since)
        if since is not None and not lost:
            lost.append(identity)
            raise OutcomeUnknown("the registry", "no response")
        return identity

    monkeypatch.setattr(LocalCoordinator, "join", lose_the_first_response)

    async def scenario(env: Environment) -> None:
        lost.clear()
        listener = Recorder()
        async with member(env, "a", listener, static=static) as a:
            await until(env, lambda: len(listener.owned) == 4)
            env.registry.run(lambda tx: evict(tx, GROUP, "a"))
            await until(env, lambda: listener.error is not None or (bool(lost) and len(listener.owned) == 4))
            assert listener.error is None
            assert a.identity.epoch > lost[0].epoch

    run(scenario)


def test_an_owner_learns_in_time_that_the_next_one_took_too_long_to_prepare(run: Run) -> None:
    async def scenario(env: Environment) -> None:
        first, second = Recorder(), Recorder()
        forever = {"session_timeout": 600.0}  # it does not wait for a heartbeat
        async with member(env, "a", first, **forever):
            await until(env, lambda: len(first.owned) == 4)
            async with member(env, "b", second, prepare_seconds=0.5, **forever):
                await until(env, lambda: len(first.seen("revoked")) == 2)
                assert second.seen("incoming") == first.seen("revoked"), "they are those that were being prepared"
                assert second.owned == {}, "their owner has not released them"

    run(scenario)


def test_members_of_a_process_send_heartbeats_together_and_read_their_assignment_when_it_changes(
    run_by_hand: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[set[str]] = []
    read: list[str] = []
    heartbeat, assignment = protocol.heartbeat, protocol.assignment

    def heartbeats(tx: Transaction, heartbeats: Sequence[Heartbeat]) -> list[Fenced | None]:
        sent.append({heartbeat.member for heartbeat in heartbeats})
        return heartbeat(tx, heartbeats)

    def assignments(tx: Snapshot, group: str, name: str, epoch: int) -> protocol.MemberAssignment:
        read.append(name)
        return assignment(tx, group, name, epoch)

    async def scenario(env: Environment) -> None:
        recorders = {name: Recorder() for name in "abcd"}
        members: list[Membership] = []
        async with contextlib.AsyncExitStack() as stack:
            for name, recorder in recorders.items():
                joined = member(env, name, recorder, partitions=[Partition(TOPIC, "abcd".index(name))])
                members.append(await stack.enter_async_context(joined))
            await until(env, lambda: all(len(recorder.owned) == 1 for recorder in recorders.values()))
            with monkeypatch.context() as patched:
                patched.setattr(protocol, "heartbeat", heartbeats)
                patched.setattr(protocol, "assignment", assignments)
                await until(env, lambda: {"a", "b", "c", "d"} in sent)
                read.clear()
                await until(env, lambda: sum(map(len, sent)) > 12)
                assert read == []
                patched.setattr("shardyard.groups.assignment._why_evict", lambda *_: None)
                patched.setattr(Membership, "_next_heartbeat", lambda _: math.inf)  # each of them sends one more
                since = env.node.clock.monotonic()
                await until(env, lambda: all(member.last_contact > since for member in members))
                sent.clear()
                env.registry.run(lambda tx: evict(tx, GROUP, "c"))
                await until(env, lambda: bool(recorders["c"].seen("lost")))
                assert (sent, set(read)) == ([], {"c"}), "it was told to read, and the others were not"

    run_by_hand(scenario)


def test_an_incoming_partition_whose_owner_stays_after_all_is_lost(run: Run) -> None:
    async def scenario(env: Environment) -> None:
        first, second = Recorder(), Recorder()
        async with member(env, "a", first), member(env, "b", second, prepare_seconds=60.0):
            pass
        async with member(env, "a", first):
            await until(env, lambda: len(first.owned) == 4)
            second.events.clear()
            async with member(env, "b", second, prepare_seconds=60.0):
                await until(env, lambda: len(second.coming) == 2)
                with transaction(env.registry) as tx:
                    configure(tx, GROUP, GroupConfig(max_active=1), who="ann")
                await until(env, lambda: second.coming == set())
                assert second.seen("lost") == second.seen("incoming")
                assert second.seen("assigned") == set()

    run(scenario)


def test_a_directory_follows_owners_with_their_addresses_and_members_without_partitions(
    run: Run,
) -> None:
    async def scenario(env: Environment) -> None:
        listener = Recorder()
        p0 = Partition(TOPIC, 0)
        async with Directory(env.node, GROUP) as directory:
            assert (directory.owner_of(p0), directory.members()) == (None, {})
            async with (
                member(env, "a", listener, address="10.0.0.1:7400", metadata={"zone": "b"}),
                member(env, "watcher", MembershipListener(), topics=[], address="10.0.0.9:7400"),
            ):
                await until(env, lambda: directory.owner_of(p0) is not None and "watcher" in directory.members())
                owner = directory.owner_of(p0)
                assert owner is not None
                await until(env, lambda: p0 in listener.owned)
                assert (owner.member, owner.address, owner.epoch) == ("a", "10.0.0.1:7400", listener.owned[p0].epoch)
                assert directory.members()["a"].metadata == {"zone": "b"}
                assert directory.members()["watcher"].address == "10.0.0.9:7400"
                changed = asyncio.create_task(directory.changed())
                await asyncio.sleep(0)
            async with asyncio.timeout(60):
                await changed
            await until(env, lambda: directory.owner_of(p0) is None and directory.members() == {})

    run(scenario)


def test_a_directory_knows_the_members_of_a_broadcast_group(run: Run) -> None:
    async def scenario(env: Environment) -> None:
        config = GroupConfig(broadcast=True)
        first, second = Recorder(), Recorder()
        async with (
            Directory(env.node, GROUP) as directory,
            member(env, "a", first, config=config),
            member(env, "b", second, config=config),
        ):
            await until(env, lambda: (len(first.owned), len(second.owned)) == (4, 4))
            await until(env, lambda: set(directory.members()) == {"a", "b"})
            assert directory.owner_of(Partition(TOPIC, 0)) is None

    run(scenario)


def test_a_member_needs_an_open_node(run: Run) -> None:
    async def scenario(env: Environment) -> None:
        closed = Node(env.log, env.registry)
        with pytest.raises(InvalidCall, match="the node is not open"):
            async with Membership(closed, JoinRequest(GROUP, "a"), MembershipListener()):
                pass
        await asyncio.to_thread(closed.transactions.close)

    run(scenario)


def test_a_member_that_was_cut_off_for_its_session_comes_back_under_new_epochs(
    run_by_hand: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if nobody evicted it meanwhile, because the registry was out of reach for all: what it had in flight is
    lost, so a record is never delivered twice under one epoch."""
    monkeypatch.setattr("shardyard.groups.assignment._why_evict", lambda *_: None)

    async def scenario(env: Environment) -> None:
        recorder = Recorder()
        async with member(env, "a", recorder, session_timeout=1.0):
            await until(env, lambda: len(recorder.owned) == 4)
            before = dict(recorder.owned)

            async def unreachable(*_: object) -> None:
                raise Busy("the registry", 1.0)

            with monkeypatch.context() as outage:
                outage.setattr(env.node.coordinator, "heartbeat", unreachable)
                outage.setattr(env.node.coordinator, "assignment", unreachable)
                await until(env, lambda: not recorder.owned)
            await until(env, lambda: len(recorder.owned) == 4)
            assert all(grant.epoch > before[partition].epoch for partition, grant in recorder.owned.items())
            assert recorder.error is None

    run_by_hand(scenario)


def test_an_outage_is_logged_once_whatever_is_retried_meanwhile(
    run_by_hand: Run, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def logged() -> list[str]:
        lines = [f"{r.levelname} {r.getMessage()}" for r in caplog.records if r.name == membership.__name__]
        caplog.clear()
        return lines

    async def scenario(env: Environment) -> None:
        attempts = 0

        async def unreachable(*_: object) -> None:
            nonlocal attempts
            attempts += 1
            raise Busy("the registry", 1.0)

        recorder = Recorder()
        async with member(env, "a", recorder):
            await until(env, lambda: len(recorder.owned) == 4)
            caplog.clear()
            with monkeypatch.context() as outage:
                outage.setattr(env.node.coordinator, "heartbeat", unreachable)
                await until(env, lambda: attempts > 1)
            await until(env, lambda: "a is in touch with group billing again" in caplog.messages)
            assert logged() == [
                "WARNING the heartbeat of a will be retried: the registry was busy for 1 s: try again",
                "INFO a is in touch with group billing again",
            ]
            with monkeypatch.context() as outage:
                for call in ("heartbeat", "assignment", "join"):
                    outage.setattr(env.node.coordinator, call, unreachable)
                await until(env, lambda: not recorder.owned and "joining again" in caplog.text)
            await until(env, lambda: len(recorder.owned) == 4)
            assert logged() == [
                "WARNING the heartbeat of a will be retried: the registry was busy for 1 s: try again",
                "WARNING a was out of touch for longer than its session, and will join again",
                "WARNING joining again will be retried: the registry was busy for 1 s: try again",
                "INFO a has joined group billing again",
            ]
            with transaction(env.registry) as tx:
                evict(tx, GROUP, "a")
            await until(env, lambda: "has joined" in caplog.text)
            fenced, joined = logged()
            assert fenced.startswith("WARNING ")
            assert joined == "INFO a has joined group billing again"

    caplog.set_level(logging.INFO, "shardyard")
    run_by_hand(scenario)
