"""One frame of each kind of a connection for sharded queues, and more of those with optional fields."""

from shardyard.wire import sharding_frames as frames
from shardyard.wire.errors import ErrorBody

COLUMNS = frames.MessageColumns(
    [b"1", b"2"],
    ["cat.png", ""],
    [(("tag", b"q"),), ()],
    [("dog.png",), ()],
    [(), ("bird.png",)],
    [(("message_id", "7"),), ()],
    [None, 500],
)

CALLS: list[frames.Call] = [
    frames.Publish("images", frames.MessageColumns([b"1"], ["cat.png"])),
    frames.Publish("images", COLUMNS, "p", 3),
    frames.Consume("images"),
    frames.Consume("images", local=True),
    frames.Subscribe("sharding: images - a - 0", 100),
    frames.Get("sharding: images - a - 0", no_ack=True),
    frames.Ack(5, [1, 2], multiple=True),
    frames.Nack(5, [3], requeue=False),
    frames.Nack(5, [4], failed=False),
    frames.Cancel(),
]
ANSWERS: list[frames.Answer] = [
    frames.DONE,
    frames.Failed(ErrorBody("unknown_exchange", "exchange 'x' does not exist", {"exchange": "x"})),
    frames.Routed([1, 0], {1: ErrorBody("queue_full", "full")}),
    frames.Attached([("q", "http://127.0.0.1:7400"), ("r", None)]),
    frames.Deliveries(1, [b"1"], ["cat.png"], [7]),
    frames.Deliveries(2, [b"2"], [""], [8], [(("property.message_id", b"7"),)], [True], [3]),
    frames.ENDED,
]
