"""One frame of each kind, and more of those with optional fields."""

from shardyard.wire import frames, requests, responses
from shardyard.wire.columns import RecordColumns
from shardyard.wire.errors import ErrorBody

COLUMNS = RecordColumns(["a", "b"], [b"1", b"2"], [7, 8], [b"k", None], [(("tag", b"q"),), ()])

CALLS: list[frames.Call] = [
    frames.Publish("orders", RecordColumns(["a"], [b"1"], [7]), requests.Publish()),
    frames.Publish("orders", COLUMNS, requests.Publish(producer="p", sequence=3), after=4),
    frames.Publish("orders", b"an Arrow stream", requests.Publish(partition=2)),
    frames.Read("billing", "orders/3", requests.Read(offset=700, owner=2, epoch=1, wait_seconds=5.0)),
    frames.Commit("billing", "worker-1", requests.Commit(3, {"orders/0": (5, 1, 700)})),
    frames.Heartbeat("billing", "worker-1", requests.Heartbeat(3, ["orders/0"])),
    frames.Watch("billing", "worker-1", 3),
    frames.Cancel(),
    frames.Request("POST", "/v1/topics", {"a": "b"}, {"content-type": "application/json"}, b"{}"),
    frames.Fence("billing", "orders/3", 2),
    frames.Span("orders/3"),
    frames.Assignment("billing", "worker-1", 3),
]
ANSWERS: list[frames.Answer] = [
    frames.NOTHING,
    frames.result_of(responses.Published([responses.Stored("orders", 0, 1, 700, 2, False)], 0)),
    frames.Failed(ErrorBody("unknown_topic", "topic 'x' does not exist", {"topic": "x"})),
    frames.CHANGED,
    frames.Response(200, b'{"alive": true}'),
]
