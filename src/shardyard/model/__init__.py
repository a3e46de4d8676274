"""The words of Shardyard. Everyone imports this package; it imports nobody."""

from shardyard.model.clock import Clock, ManualClock, SystemClock
from shardyard.model.errors import Fenced, InvalidCall, InvalidValue, RetryLater, ShardyardError
from shardyard.model.words import (
    Assignment,
    Group,
    Member,
    Move,
    Partition,
    Position,
    Record,
    Topic,
    TopicKind,
    whole_number,
)

__all__ = [
    "Assignment",
    "Clock",
    "Fenced",
    "Group",
    "InvalidCall",
    "InvalidValue",
    "ManualClock",
    "Member",
    "Move",
    "Partition",
    "Position",
    "Record",
    "RetryLater",
    "ShardyardError",
    "SystemClock",
    "Topic",
    "TopicKind",
    "whole_number",
]
