"""Settings of topics and groups that are stored on the server. Changes take effect without restarting anything.

What the rebalancer needs to know of a group (`assignor`, `max_active`, `release_after`, `broadcast`) is its
`GroupConfig`, which is stored with the group. The other settings are stored as JSON. The API shows both as one
`GroupSettings`.
"""

import hashlib
import hmac
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, fields, replace
from typing import Any, TypeVar

import msgspec
from msgspec import Struct, structs

from shardyard.groups import GroupConfig, configure
from shardyard.groups.broadcast import groups_of, is_member_group, parent_group
from shardyard.groups.config import config_of
from shardyard.model import InvalidValue, WrongToken
from shardyard.registry import Snapshot, Transaction
from shardyard.wire.settings import Count, GroupSettings, without_null_lists
from shardyard.wire.validation import masked, validation_error

NAME = "queue"
"""The name of the row with all settings of a topic or group."""
WATCH_NAME = "settings"
"""Touched by every change of settings."""

S = TypeVar("S", bound=Struct)

_CONFIG_FIELDS = frozenset(field.name for field in fields(GroupConfig))
_TOKEN = re.compile(r"[!-~]{8,}")
"""What every client can send in a header."""


class TopicSettings(Struct, frozen=True, forbid_unknown_fields=True):
    """The settings of a topic."""

    token_hash: str | None = None
    """The hash of the token that publishers must show; None: no token is needed."""
    records_per_second: Count | None = None
    """How many records all publishers together may send through each broker."""

    def admits(self, token: str | None) -> bool:
        """Whether a caller with this token may publish."""
        return self.token_hash is None or (token is not None and hmac.compare_digest(self.token_hash, hashed(token)))


def hashed(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()


def topic_scope(topic: str) -> str:
    return f"topic/{topic}"


def group_scope(group: str) -> str:
    return f"group/{group}"


def is_joined(tx: Snapshot, group: str) -> bool:
    """Whether an existing group has, or had, a member. Settings may be changed before the first member joins."""
    if tx.setting(group_scope(group), NAME) is None:  # only a member can have created the group
        return True
    names = groups_of(tx, group)
    owned = any(row.epoch for name in names for row in tx.ownerships(name))
    return owned or any(is_member_group(name) or tx.members(name) for name in names)


def topic_settings(tx: Snapshot, topic: str, names: Iterable[str] = ()) -> TopicSettings:
    """The settings of a topic. `names`: its token is that of the first of these topics that has one."""
    found = msgspec.convert(_stored(tx, topic_scope(topic)), TopicSettings)
    tokens = (topic_settings(tx, name).token_hash for name in names)
    token = next((token for token in tokens if token is not None), found.token_hash)
    return found if token == found.token_hash else structs.replace(found, token_hash=token)


def topic_token_hashes(tx: Snapshot) -> frozenset[str]:
    """The hashes of the tokens of all topics."""
    topics = [scope.removeprefix("topic/") for scope in tx.scopes() if scope.startswith("topic/")]
    found = [topic_settings(tx, topic).token_hash for topic in topics]
    return frozenset(token_hash for token_hash in found if token_hash is not None)


def group_settings(tx: Snapshot, group: str) -> GroupSettings:
    """The settings of a group. The own group of a member of a broadcast group has the settings of the broadcast
    group."""
    parent = parent_group(group)
    stored = {name: value for name, value in _stored(tx, group_scope(parent)).items() if name not in _CONFIG_FIELDS}
    settings = msgspec.convert(stored, GroupSettings)
    row = tx.group(parent)
    return settings if row is None else structs.replace(settings, **asdict(config_of(row)))


def initial_config(settings: GroupSettings) -> GroupConfig:
    """The configuration of a group that is created with these settings. In particular, a member that hangs is evicted
    after the default `release_after` of `GroupSettings`, whereas other groups evict no member by default."""
    return GroupConfig(**{name: getattr(settings, name) for name in _CONFIG_FIELDS})


def check_topic(changes: Mapping[str, Any]) -> dict[str, Any]:
    """Check changes of topic settings. Returns them as they are stored: with the hash of a token instead of it."""
    checked = dict(changes)
    if "token" in checked:
        token = checked.pop("token")
        if token is not None and (not isinstance(token, str) or not _TOKEN.fullmatch(token)):
            raise InvalidValue("token", "***", "at least 8 ASCII characters without spaces, or null to require none")
        checked["token_hash"] = None if token is None else hashed(token)
    _apply(TopicSettings(), checked)
    return checked


def check_topic_token(tx: Snapshot, topic: str, names: Iterable[str], shown: str | None) -> None:
    """`WrongToken` if the topic has a token, and the caller who wants to change or delete the topic has not shown it.
    `names`: as for `topic_settings`. `shown`: the token of the call."""
    if not topic_settings(tx, topic, names).admits(shown):
        raise WrongToken(f"changing or deleting topic {topic!r}", "its current token, or that of the broker")


def change_topic(
    tx: Transaction, topic: str, who: str, changes: Mapping[str, Any], limits: Mapping[str, Any] | None = None
) -> TopicSettings:
    """Change the named settings and leave the others. `token` sets `token_hash`: the token itself is not stored.

    `limits`: what the same call changed in the log; it is audited together with the settings.
    """
    changed = _apply(topic_settings(tx, topic), check_topic(changes))
    if changes:
        tx.put_setting(topic_scope(topic), NAME, msgspec.to_builtins(changed))
        tx.touch(WATCH_NAME)
    tx.audit(who, "topic settings changed", topic, _masked({**changes, **(limits or {})}))
    return changed


def hand_over_token(tx: Transaction, topic: str, heirs: Iterable[str], names: Iterable[str], who: str) -> None:
    """Give the token of a topic, which is about to be deleted, to the topics that it leaves behind, unless they have
    one. `names`: as for `topic_settings`."""
    token = topic_settings(tx, topic, names).token_hash
    for heir in heirs if token is not None else ():
        settings = topic_settings(tx, heir)
        if settings.token_hash is None:
            tx.put_setting(topic_scope(heir), NAME, msgspec.to_builtins(structs.replace(settings, token_hash=token)))
            tx.touch(WATCH_NAME)
            tx.audit(who, "topic settings changed", heir, {"token of": topic})


def change_group(tx: Transaction, group: str, who: str, changes: Mapping[str, Any]) -> GroupSettings:
    """Change the named settings and leave the others. The group is created if it does not exist. `InvalidValue` if
    `broadcast` changes while the group has members."""
    before = group_settings(tx, group)
    changed = _apply(before, changes)
    config = initial_config(changed)
    if tx.group(group) is None or config != initial_config(before):
        configure(tx, group, config, who=None)
        for name in groups_of(tx, group):
            if is_member_group(name):
                configure(tx, name, replace(config, broadcast=False), who=None)
    stored = {name: value for name, value in msgspec.to_builtins(changed).items() if name not in _CONFIG_FIELDS}
    tx.put_setting(group_scope(group), NAME, stored)
    tx.touch(WATCH_NAME)
    tx.audit(who, "group settings changed", group, _masked(changes))
    return changed


def delete_settings(tx: Transaction, scope: str) -> None:
    """Delete the settings of a topic or group that was deleted, and what else is stored with it: another one of the
    same name starts with none."""
    for row in tx.settings(scope):
        tx.delete_setting(scope, row.name)
    tx.touch(WATCH_NAME)


def _stored(tx: Snapshot, scope: str) -> dict[str, Any]:
    row = tx.setting(scope, NAME)
    return {} if row is None else msgspec.convert(row.value, dict[str, Any])


def _apply(before: S, changes: Mapping[str, Any]) -> S:
    changes = without_null_lists(type(before), changes)
    try:
        return msgspec.convert({**msgspec.to_builtins(before), **changes}, type(before))
    except msgspec.ValidationError:
        raise validation_error(type(before), changes, "setting") from None


def _masked(changes: Mapping[str, Any]) -> dict[str, Any]:
    """The changes for the audit log, without secrets. That a secret was removed is no secret."""
    return {name: None if value is None else masked(name, value) for name, value in changes.items()}
