"""Delayed records: publishing them (`Delays`) and delivering them when they are due (`Scheduler`).

Delayed records wait in the log itself, on a ladder of internal topics. Each topic, a rung, has one fixed waiting time,
so a rung is first in, first out, and no index of due times is needed. A record goes to the longest rung that is not
longer than its remaining delay. When it has waited there, it moves to the next rung, and when it is due, to its target.
"""

from shardyard.queues.delays.delayed import Delays
from shardyard.queues.delays.ladder import LADDER_MS, RUNG
from shardyard.queues.delays.scheduler import GROUP, UNDELIVERABLE, Scheduler

__all__ = ["GROUP", "LADDER_MS", "RUNG", "UNDELIVERABLE", "Delays", "Scheduler"]
