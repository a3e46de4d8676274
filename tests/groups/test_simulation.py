"""Thousands of random histories of groups; see `simulation`. SHARDYARD_SEED moves to other seeds."""

import os
import re
from collections.abc import Mapping
from dataclasses import replace

import pytest
from msgspec import structs

from shardyard.groups import assignment, position_reset, protocol
from shardyard.model import Partition, Position
from shardyard.registry import GroupRow, MemberRow, OwnershipRow, PositionCommit, Transaction, lease
from shardyard.registry.memory import MemorySnapshot, MemoryTransaction
from tests.groups.simulation import run_history

HISTORIES = 5_000
CHUNK = 250
FIRST = int(os.environ.get("SHARDYARD_SEED", "0"))
SHORT = range(FIRST, FIRST + 100)
LONG = [range(start, start + CHUNK) for start in range(SHORT.stop, FIRST + HISTORIES, CHUNK)]


@pytest.mark.parametrize(
    "seeds", [SHORT, *(pytest.param(seeds, marks=pytest.mark.long) for seeds in LONG)], ids=lambda seeds: seeds.start
)
def test_the_guarantees_hold_in_every_history(seeds: range) -> None:
    histories, count = [run_history(seed) for seed in seeds], len(seeds)
    assert sum(history.decisions for history in histories) > count, "the histories are too quiet to prove anything"
    assert sum(history.refused for history in histories) > count // 2, "hardly anybody was fenced"
    assert sum(history.moves for history in histories) > count // 4, "hardly any topic moved"
    assert sum(history.together for history in histories) > count, "hardly anything was committed together"
    assert sum(history.behind for history in histories) > count // 4, "hardly any commit was behind"
    assert sum(history.resets for history in histories) > count, "hardly anything was reset"
    assert sum(history.overtaken for history in histories) > count // 4, "hardly anybody was overtaken by a reset"
    assert sum(history.prepared for history in histories) > count // 4, "hardly anybody prepared"
    assert sum(history.overdue for history in histories) > count // 4, "hardly anybody took too long to prepare"
    assert sum(history.broadcast for history in histories) > count // 20, "hardly any group was a broadcast group"
    assert sum(history.repeated for history in histories) > count // 4, "hardly any join was repeated"
    present = sum(not member.topics for history in histories for member in history.members)
    assert present > count // 10, "hardly anybody was only present"


def test_a_seed_replays_exactly() -> None:
    first, second = list[str](), list[str]()
    run_history(FIRST + 7, first.append)
    run_history(FIRST + 7, second.append)
    assert first == second != []


def first_failure() -> str:
    """The message of the first history that fails."""
    for seed in range(FIRST, FIRST + CHUNK):
        try:
            run_history(seed)
        except AssertionError as error:
            return str(error)
    return ""


def test_commits_without_fencing_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def commit(tx: MemoryTransaction, commit: PositionCommit) -> bool:
        rows = [(tx.ownership(commit.group, p), position) for p, (_, position) in commit.positions.items()]
        tx.put_ownerships(replace(row, committed=position) for row, position in rows if row is not None)
        return True

    monkeypatch.setattr(MemoryTransaction, "_commit", commit)
    assert re.search("without owning them|two owners|went back", first_failure())


def test_a_commit_that_is_stored_in_part_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = MemoryTransaction._commit

    def in_parts(tx: MemoryTransaction, commit: PositionCommit) -> bool:
        parts = [structs.replace(commit, positions={p: position}) for p, position in commit.positions.items()]
        stored = [whole(tx, part) for part in parts]
        return all(stored)

    monkeypatch.setattr(MemoryTransaction, "_commit", in_parts)
    assert re.search("a commit was lost or invented", first_failure())


def test_heartbeats_of_former_members_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MemoryTransaction, "renew_sessions", lambda _tx, heartbeats: [True] * len(heartbeats))
    assert re.search("not a member, and got None|did not renew its session", first_failure())


def test_a_member_that_takes_its_own_join_for_anothers_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "_is_same_process", lambda *_: False)
    assert re.search("was fenced by its own join|is in the way of its own join", first_failure())


def test_members_that_are_not_notified_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "touch", lambda tx, group, *_members: tx.touch(protocol.watch_name(group)))
    assert re.search("was not notified of a change", first_failure())


def test_a_rebalancer_that_overlooks_expired_sessions_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MemorySnapshot, "group_times", lambda _tx: [])
    assert re.search("not settled", first_failure())


def test_a_lease_without_its_token_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease, "check", lambda *_: None)
    assert re.search("a stale leader passed the check", first_failure())


def test_a_successor_that_does_not_wait_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assignment, "_without_waiting", lambda after, *_: dict(after))
    assert re.search("are owned at once", first_failure())


def test_a_successor_that_waits_for_ever_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "_ends", lambda _: False)
    assert re.search("not settled", first_failure())


def test_a_rebalancer_that_hands_over_without_a_new_epoch_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    give = protocol.give

    def without_epoch(tx: Transaction, row: GroupRow, rows: list[OwnershipRow]) -> GroupRow:
        give(tx, row, rows)
        return row

    monkeypatch.setattr(protocol, "give", without_epoch)
    assert re.search("two owners|went back|without owning them", first_failure())


def test_a_reset_without_a_new_epoch_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    reset = position_reset.reset

    def without_epoch(tx: Transaction, group: str, positions: Mapping[Partition, Position], who: str) -> None:
        before = {row.partition: row.epoch for row in tx.ownerships(group)}
        reset(tx, group, positions, who)
        rows = [row for row in tx.ownerships(group) if row.partition in before]
        tx.put_ownerships(replace(row, epoch=before[row.partition]) for row in rows)

    monkeypatch.setattr(position_reset, "reset", without_epoch)
    assert re.search("under an epoch from before its reset", first_failure())


def test_a_reset_that_forgets_its_position_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    reset = position_reset.reset

    def without_position(tx: Transaction, group: str, positions: Mapping[Partition, Position], who: str) -> None:
        before = {row.partition: row.committed for row in tx.ownerships(group)}
        reset(tx, group, positions, who)
        rows = [row for row in tx.ownerships(group) if row.partition in before]
        tx.put_ownerships(replace(row, committed=before[row.partition]) for row in rows)

    monkeypatch.setattr(position_reset, "reset", without_position)
    assert re.search("a commit was lost or invented", first_failure())


def test_a_partition_that_is_revoked_before_its_next_owner_is_ready_would_be_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(protocol, "_is_preparing", lambda _tx, _row: False)
    assert re.search("was revoked before m[0-9]+ was ready", first_failure())


def test_a_preparation_that_never_ends_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "_is_preparing", lambda _tx, row: row.handover_at > 0)
    assert re.search("not settled after", first_failure())


def test_a_dead_member_that_stays_the_target_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def evict(tx: Transaction, row: GroupRow, member: MemberRow) -> GroupRow:
        tx.delete_member(row.name, member.name)
        tx.put_group(row)
        return row

    monkeypatch.setattr(protocol, "evict", evict)
    assert re.search("which is gone|not settled after", first_failure())


def test_members_of_a_broadcast_group_that_share_positions_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "member_group", lambda group, _member: f"{group}~shared")
    assert first_failure()
