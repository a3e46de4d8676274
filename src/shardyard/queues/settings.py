"""What is set on the server about topics and groups; it takes effect without restarting anybody."""

import hashlib
import hmac
import re
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec
from msgspec import Struct

from shardyard.groups import GroupConfig, configure
from shardyard.groups.broadcast import groups_of, is_member_group, parent_group
from shardyard.model import InvalidValue
from shardyard.registry import Snapshot, Transaction
from shardyard.wire.settings import Count, GroupSettings
from shardyard.wire.validation import masked, validation_error

NAME = "queue"
"""Of the row that has all settings of a topic or group."""

S = TypeVar("S", bound=Struct)

_TOKEN = re.compile(r"[!-~]{8,}")
"""What every client can send in a header."""


class TopicSettings(Struct, frozen=True, forbid_unknown_fields=True):
    """About a topic."""

    token_hash: str | None = None
    """Of the token that publishers must show; None: nobody is asked for one."""
    records_per_second: Count | None = None
    """What publishers together may send through each broker."""

    def admits(self, token: str | None) -> bool:
        """Whether who shows this token may publish."""
        return self.token_hash is None or (token is not None and hmac.compare_digest(self.token_hash, hashed(token)))


def hashed(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()


def sharing(settings: GroupSettings) -> dict[str, Any]:
    """What of it the rebalancer goes by."""
    return {name: getattr(settings, name) for name in ("assignor", "max_active", "release_after")}


def topic_scope(topic: str) -> str:
    return f"topic/{topic}"


def group_scope(group: str) -> str:
    return f"group/{group}"


def is_joined(tx: Snapshot, group: str) -> bool:
    """Whether anybody is, or was, a member of a group that exists: it may be set before the first one joins."""
    if tx.setting(group_scope(group), NAME) is None:  # what else would it exist by
        return True
    those = groups_of(tx, group)
    owned = any(row.epoch for part in those for row in tx.ownerships(part))
    return owned or any(is_member_group(part) or tx.members(part) for part in those)


def topic_settings(tx: Snapshot, topic: str) -> TopicSettings:
    return _load(TopicSettings, tx, topic_scope(topic))


def group_settings(tx: Snapshot, group: str) -> GroupSettings:
    return _load(GroupSettings, tx, group_scope(parent_group(group)))


def check_topic(changes: Mapping[str, Any]) -> dict[str, Any]:
    """The changes as they are kept, if they may be made: the hash of a token."""
    told = dict(changes)
    if "token" in told:
        token = told.pop("token")
        if token is not None and (not isinstance(token, str) or not _TOKEN.fullmatch(token)):
            raise InvalidValue("token", "***", "at least 8 ASCII characters without spaces, or null to ask for none")
        told["token_hash"] = None if token is None else hashed(token)
    _changed(TopicSettings(), told)
    return told


def change_topic(
    tx: Transaction, topic: str, who: str, changes: Mapping[str, Any], limits: Mapping[str, Any] | None = None
) -> TopicSettings:
    """Change some settings and leave the others. `token` stands for `token_hash`: the token itself is not kept.

    `limits`: what was set in the log by the same call; it is audited with them.
    """
    changed = _changed(topic_settings(tx, topic), check_topic(changes))
    if changes:
        tx.put_setting(topic_scope(topic), NAME, msgspec.to_builtins(changed))
    tx.audit(who, "topic settings changed", topic, _masked({**changes, **(limits or {})}))
    return changed


def change_group(tx: Transaction, group: str, who: str, changes: Mapping[str, Any]) -> GroupSettings:
    """Change some settings and leave the others."""
    before = group_settings(tx, group)
    changed = _changed(before, changes)
    those = groups_of(tx, group)
    if changed.broadcast != before.broadcast and any(tx.members(part) for part in those):
        raise InvalidValue("broadcast", changed.broadcast, "no change while the group has members")
    shared = sharing(changed)
    if tx.group(group) is None or any(shared[name] != getattr(before, name) for name in shared):
        for part in {group, *those}:
            configure(tx, part, GroupConfig(**shared, broadcast=changed.broadcast and part == group), who=None)
    tx.put_setting(group_scope(group), NAME, msgspec.to_builtins(changed))
    tx.audit(who, "group settings changed", group, _masked(changes))
    return changed


def forget(tx: Transaction, scope: str) -> None:
    """What is about is gone: another one of that name begins anew."""
    if tx.setting(scope, NAME) is not None:
        tx.delete_setting(scope, NAME)


def _load(kind: type[S], tx: Snapshot, scope: str) -> S:
    row = tx.setting(scope, NAME)
    return kind() if row is None else msgspec.convert(row.value, kind)


def _changed(before: S, changes: Mapping[str, Any]) -> S:
    try:
        return msgspec.convert({**msgspec.to_builtins(before), **changes}, type(before))
    except msgspec.ValidationError:
        raise validation_error(type(before), changes, "setting") from None


def _masked(changes: Mapping[str, Any]) -> dict[str, Any]:
    """What may be told of the changes; also of a secret that it was taken away."""
    return {name: None if value is None else masked(name, value) for name, value in changes.items()}
