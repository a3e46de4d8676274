"""The errors of sharded queues, in the branches of `shardyard.model.errors`."""

from collections.abc import Sequence

from shardyard.model.errors import Conflict, InvalidCall, NotStored, RetryLater, ShardyardError, Unroutable
from shardyard.model.sharding import OutgoingMessage


class UnknownExchange(InvalidCall):
    """Raised when an exchange does not exist."""

    def __init__(
        self,
        exchange: str,
        advice: str = "`shardyard exchanges list` shows those that do, and `shardyard exchanges declare NAME` creates "
        "one",
    ) -> None:
        super().__init__(f"exchange {exchange!r} does not exist: {advice}")
        self.exchange = exchange


class UnknownQueue(InvalidCall):
    """Raised when there is neither a queue nor a sharded exchange of that name."""

    def __init__(
        self,
        queue: str,
        advice: str = "`shardyard exchanges bind EXCHANGE QUEUE` declares one, and `shardyard policies set` gives an "
        "exchange of that name shards",
    ) -> None:
        super().__init__(f"queue {queue!r} does not exist: {advice}")
        self.queue = queue


class UnknownPolicy(InvalidCall):
    """Raised when a policy does not exist."""

    def __init__(self, policy: str) -> None:
        super().__init__(
            f"policy {policy!r} does not exist: `shardyard policies list` shows those that do, and `shardyard policies "
            "set NAME PATTERN` creates one"
        )
        self.policy = policy


class UnknownNode(InvalidCall):
    """Raised when no node of that name ever joined, or it was forgotten."""

    def __init__(self, node: str) -> None:
        super().__init__(f"node {node!r} is not known: `shardyard nodes list` shows those that are")
        self.node = node


class ExchangeExists(Conflict):
    """Raised when an exchange is declared again with another type or other arguments."""

    def __init__(self, exchange: str, existing: str) -> None:
        """`existing`: how it was declared, such as "as x-modulus-hash"."""
        super().__init__(f"exchange {exchange!r} exists already, declared {existing}: declare it so, or delete it")
        self.exchange = exchange
        self.existing = existing


class QueueExists(Conflict):
    """Raised when a queue is declared again with other limits, or is in the way of a sharded exchange."""

    def __init__(self, queue: str, why: str) -> None:
        super().__init__(f"queue {queue!r} exists already, {why}")
        self.queue = queue
        self.why = why


class PseudoQueue(InvalidCall):
    """Raised when a sharded exchange's name is used like that of a queue, other than to consume, get or purge."""

    def __init__(self, queue: str, operation: str) -> None:
        """`operation`: what was tried, such as "declared"."""
        advice = {
            "deleted": "delete the exchange",
            "purged": "purge the exchange",
            "shown": "show the exchange, or one of its shards",
            "got from": "get from the exchange",
        }
        super().__init__(
            f"{queue!r} is a sharded exchange, whose name stands for all of its shards, and can't be {operation} as a "
            f"queue: {advice.get(operation, 'its policy does that for each shard')}"
        )
        self.queue = queue
        self.operation = operation


class ShardManaged(InvalidCall):
    """Raised when a shard is declared, bound, unbound or deleted by its name: its policy does that."""

    def __init__(self, queue: str, operation: str) -> None:
        advice = "change the policy of its exchange" + ("" if operation == "deleted" else ", or choose another name")
        super().__init__(
            f"{queue!r} is the name of a queue that Shardyard creates and removes itself, and can't be {operation}: "
            f"{advice}"
        )
        self.queue = queue
        self.operation = operation


class NodeRunning(Conflict):
    """Raised when a node is to be forgotten while it runs."""

    def __init__(self, node: str) -> None:
        super().__init__(f"node {node!r} is running: stop it first, then forget it")
        self.node = node


class NodeNameTaken(Conflict):
    """Raised when a broker starts under the name of a node that runs."""

    def __init__(self, node: str) -> None:
        super().__init__(
            f"a broker with the node name {node!r} is running, or was killed some seconds ago: if two are to run, "
            "start one of them with another --node-name"
        )
        self.node = node


class RebalanceRunning(Conflict):
    """Raised when an exchange is to be rebalanced while another call does."""

    def __init__(self, exchange: str) -> None:
        super().__init__(f"exchange {exchange!r} is being rebalanced already: wait until that is done")
        self.exchange = exchange


class RebalanceUndone(RetryLater):
    """Raised when a rebalance could not be finished. Everything is where it was before."""

    def __init__(self, exchange: str, why: str) -> None:
        super().__init__(f"exchange {exchange!r} was not rebalanced, and is as it was, because {why}: try again")
        self.exchange = exchange
        self.why = why


class PartlyPurged(Conflict):
    """Raised when some shards of an exchange could not be purged, because no node serves them. The others are empty
    now."""

    def __init__(
        self, exchange: str, purged: Sequence[str], not_purged: Sequence[str], messages: int, why: str
    ) -> None:
        """`messages`: how many were removed. `why`: the reason for the first shard that was not purged."""
        super().__init__(
            f"exchange {exchange!r} was purged only in part. Purged: {_named(purged)}, where {messages} messages "
            f"waited. Not purged: {_named(not_purged)} ({why}). Purge the exchange again when each of these has an "
            "owner that runs, which the list of shards shows"
        )
        self.exchange = exchange
        self.purged = list(purged)
        self.not_purged = list(not_purged)
        self.messages = messages


def _named(queues: Sequence[str]) -> str:
    """The names of the first ones, and how many there are more."""
    names = ", ".join(map(repr, queues[:10])) or "none"
    return names if len(queues) <= 10 else f"{names} and {len(queues) - 10} more"


def refusal(
    exchange: str, messages: Sequence[OutgoingMessage], outcomes: Sequence[int | ShardyardError], *, mandatory: bool
) -> ShardyardError | None:
    """The error of a publish of several messages, some of which may not be stored. `outcomes`: for each, how many
    queues took it, or why it was refused. `mandatory`: a message that no queue took is an error."""
    errors = {place: outcome for place, outcome in enumerate(outcomes) if isinstance(outcome, ShardyardError)}
    unroutable = [place for place, outcome in enumerate(outcomes) if outcome == 0] if mandatory else []
    if errors:
        first = errors[min(errors)]
    elif unroutable:
        first = Unroutable(exchange, messages[unroutable[0]].routing_key, len(unroutable))
    else:
        return None
    return first.in_batch(sorted([*errors, *unroutable]), len(messages)) if isinstance(first, NotStored) else first
