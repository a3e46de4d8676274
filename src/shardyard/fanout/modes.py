"""The mode of the fan-out: a setting in the registry that all processes follow.

    partitioned   coordinators read `events` and append to `fanout`; each worker serves a share of its partitions
    replicated    workers read `events`; each holds the whole routing table, and serves any channel

A migration goes through phases, so that every event goes one way or the other, and none goes both ways:

    pausing       nobody reads `events`. It ends when all who did have left the group.
    finishing     those of the old mode read `events` again, up to the offsets where it ended after the pause, and so
                  complete whatever somebody who was killed has begun. It ends when all of that is committed.
    draining      from `partitioned` only: workers process what is left in `fanout`. It ends when nothing is.

Meanwhile new events wait in `events`. Each phase is one version of the setting, and a transition to the next one takes
place only if nobody else has changed the setting: any process can carry it out, and so finish what another has begun.
"""

from typing import Literal, TypeAlias, get_args

import msgspec
from msgspec import Struct

from shardyard.model import Damaged, InvalidValue
from shardyard.registry import Snapshot, Transaction

SCOPE = "fanout"
NAME = "mode"
WATCH_NAME = f"setting/{SCOPE}"

Mode: TypeAlias = Literal["partitioned", "replicated"]
Phase: TypeAlias = Literal["running", "pausing", "finishing", "draining"]
Role: TypeAlias = Literal["coordinator", "worker"]
"""Of a process."""
MODES: tuple[Mode, ...] = get_args(Mode)
AUDIT_ACTION = "fan-out mode changed"


class ModeState(Struct, frozen=True):
    """The mode, and the migration from it to another one if there is one under way."""

    mode: Mode = "partitioned"
    """While a migration is under way, the one that it began with."""
    to: Mode | None = None
    """Where the migration leads; None if none is under way."""
    phase: Phase = "running"
    until: dict[int, tuple[int, int]] = {}
    """While finishing: for each partition of `events` its epoch, and the offset before which the old mode reads."""
    version: int = 0
    """Of the setting; 0 if it was never set."""

    @property
    def is_migrating(self) -> bool:
        return self.to is not None


class Plan(Struct, frozen=True):
    """What a process does."""

    kind: Literal["coordinator", "worker", "replicated"]
    until: dict[int, tuple[int, int]] | None = None
    """Up to where it reads `events`; None: to the end, as it goes on."""


def plan_of(role: Role, state: ModeState) -> Plan | None:
    """What a process of that role does in a state; None: it stands by."""
    if role == "worker" and state.mode == "partitioned":
        return Plan("worker")
    if role == "coordinator" and state.mode == "replicated":
        return None
    kind: Literal["coordinator", "replicated"] = "coordinator" if role == "coordinator" else "replicated"
    if state.phase == "running":
        return Plan(kind)
    return Plan(kind, state.until) if state.phase == "finishing" else None


def read_state(tx: Snapshot) -> ModeState:
    """The state; the default one if it was never set."""
    row = tx.setting(SCOPE, NAME)
    if row is None:
        return ModeState()
    try:
        state = msgspec.convert(row.value, ModeState, strict=False)  # the keys of a JSON object are strings
    except msgspec.ValidationError as error:
        raise Damaged(f"the setting {SCOPE}/{NAME}", str(error)) from None
    return msgspec.structs.replace(state, version=row.version)


def check_mode(mode: str) -> Mode:
    if mode not in MODES:
        raise InvalidValue("mode", mode, " or ".join(MODES))
    return mode


def begin_migration(tx: Transaction, to: Mode, who: str) -> ModeState:
    """Begin a migration, and return the state then.

    Nothing changes if that is the mode, or a migration to it is under way. One that leads away from `to` is cancelled:
    those of the old mode go on where they stopped.
    """
    state = read_state(tx)
    if to == (state.to or state.mode):
        return state
    if state.is_migrating:
        return _put(tx, ModeState(to), who)
    return _put(tx, ModeState(state.mode, to, "pausing"), who)


def advance(tx: Transaction, before: ModeState, after: ModeState, who: str) -> ModeState:
    """Go from one state to the next. If the state is not `before` any more, nothing changes. Returns the state then."""
    state = read_state(tx)
    return _put(tx, after, who) if state.version == before.version else state


def _put(tx: Transaction, state: ModeState, who: str) -> ModeState:
    value = msgspec.to_builtins(state, str_keys=True)
    del value["version"]
    row = tx.put_setting(SCOPE, NAME, value)
    tx.audit(who, AUDIT_ACTION, SCOPE, {"mode": state.mode, "to": state.to, "phase": state.phase})
    return msgspec.structs.replace(state, version=row.version)
