"""The JSON of responses, which is public: names, order and values of its fields."""

from typing import Any

import pytest

from shardyard.model import Appended, Partition, Position, Retention, Span, Topic, TopicKind
from shardyard.wire import responses
from shardyard.wire.codec import decode, encode
from shardyard.wire.records import JsonRecord
from shardyard.wire.settings import GroupSettings

TOPIC = Topic(
    "orders",
    4,
    TopicKind.RETRY,
    Retention(60_000, 1_000),
    epoch=3,
    partitioner="jump",
    hash="xxh64",
    sealed=True,
    successor="orders-2",
    open_partitions=2,
    generation=7,
)
TOPIC_JSON = (
    b'"name":"orders","partitions":4,"receiving":2,"kind":"retry","partitioner":"jump","hash":"xxh64",'
    b'"retention_ms":60000,"retention_bytes":1000,"epoch":3,"sealed":true,"successor":"orders-2","generation":7'
)
SETTINGS = GroupSettings(backoff=(1.0,), webhook="http://alarms.example")
SETTINGS_JSON = (
    b'{"backoff":[1.0],"tags":[],"paused":false,"paused_partitions":[],"allow":[],"deny":[],"broadcast":false,'
    b'"concurrency":16,"max_records":500,"handler_seconds":null,"lag_alarm":null,"webhook":%s,"assignor":"sticky",'
    b'"max_active":null,"release_after":60.0}'
)
DRAINING = responses.DrainingPartition(3, 7, {"billing": 2}, drained=False)
DRAINING_JSON = b'{"partition":3,"records":7,"waiting_for":{"billing":2},"drained":false}'
MEMBERS = responses.ReportedSettings.for_members(SETTINGS)
GRANT = responses.GrantedPartition(5, (3, 17), revoked=True)
GRANT_JSON = b'{"orders/0":{"epoch":5,"committed":[3,17],"revoked":true}}'
KEPT = responses.KeptTopic("billing.orders.dead", 3, "dead letters")
KEPT_JSON = b'"kept":[{"topic":"billing.orders.dead","records":3,"because":"dead letters"}]}'


@pytest.mark.parametrize(
    ("response", "json"),
    [
        (responses.TopicInfo.of(TOPIC), b"{%s}" % TOPIC_JSON),
        (responses.ResizedTopic.of(TOPIC, draining=[DRAINING]), b'{%s,"draining":[%s]}' % (TOPIC_JSON, DRAINING_JSON)),
        (
            responses.TopicDescription.of(
                TOPIC, draining=[], token=True, records_per_second=50, spans=[responses.OffsetRange(0, 3)]
            ),
            b'{%s,"draining":[],"token":true,"records_per_second":50,"spans":[{"first":0,"end":3}]}' % TOPIC_JSON,
        ),
        (responses.PartitionSpan.of(Span(3, 1, 9)), b'{"epoch":3,"first":1,"end":9}'),
        (
            responses.Published([responses.Stored.of(Appended(Partition("orders", 1), Position(3, 9), 2))], 4),
            (
                b'{"stored":[{"topic":"orders","partition":1,"epoch":3,"offset":9,"count":2,"duplicate":false}],'
                b'"delayed":4}'
            ),
        ),
        (
            responses.Joined("billing", "m1", 7, MEMBERS),
            b'{"group":"billing","member":"m1","epoch":7,"settings":%s}' % (SETTINGS_JSON % b"null"),
        ),
        (
            responses.HeartbeatResponse({"orders/0": GRANT}, ["orders/1"], MEMBERS),
            b'{"partitions":%s,"incoming":["orders/1"],"settings":%s}' % (GRANT_JSON, SETTINGS_JSON % b"null"),
        ),
        (responses.Assignment({"orders/0": GRANT}, []), b'{"partitions":%s,"incoming":[]}' % GRANT_JSON),
        (responses.ReportedSettings.of(SETTINGS), SETTINGS_JSON % b'"http://alarms.example"'),
        (responses.GroupVersion("1.2.3.4"), b'{"version":"1.2.3.4"}'),
        (
            responses.FailureOutcomes(
                [
                    responses.FailureOutcome(
                        responses.FailedRecord(Partition("orders", 1), 5, 9, "bad luck"), "retry", 2, 1_000
                    )
                ]
            ),
            (
                b'{"outcomes":[{"failure":{"partition":{"topic":"orders","index":1},"epoch":5,"offset":9,'
                b'"reason":"bad luck"},"fate":"retry","attempts":2,"due":1000}]}'
            ),
        ),
        (responses.TopicDeleted("orders", ["a"], [KEPT]), b'{"topic":"orders","also_deleted":["a"],' + KEPT_JSON),
        (responses.GroupDeleted("billing", ["a"], [KEPT]), b'{"group":"billing","also_deleted":["a"],' + KEPT_JSON),
        (responses.GroupSummary("billing", 2, 9), b'{"group":"billing","members":2,"lag":9}'),
        (
            responses.DeadLetterInfo("a", JsonRecord(value="x", id="a"), "bad luck", "in f", 3, "orders/1/9", None, 5),
            (
                b'{"id":"a","record":{"value":"x","id":"a"},"reason":"bad luck","traceback":"in f","attempts":3,'
                b'"origin":"orders/1/9","published":null,"died_at":5}'
            ),
        ),
        (
            responses.AuditEntry(1, 2.5, "ann", "topic created", "orders", {"partitions": 4}),
            b'{"number":1,"at":2.5,"who":"ann","action":"topic created","subject":"orders","detail":{"partitions":4}}',
        ),
        (responses.Liveness(), b'{"alive":true}'),
        (responses.Readiness(ready=True, leads=False), b'{"ready":true,"leads":false}'),
    ],
)
def test_a_response_has_the_json_that_callers_rely_on_and_is_decoded_as_it_was(response: Any, json: bytes) -> None:
    assert encode(response) == json
    assert decode(json, type(response)) == response


@pytest.mark.parametrize("topic", [TOPIC, Topic("orders", 1), Topic("orders", 3, hash=None, partitioner="round_robin")])
def test_a_topic_is_the_same_after_it_was_sent(topic: Topic) -> None:
    sent = encode(responses.TopicInfo.of(topic))
    assert decode(sent, responses.TopicInfo).topic() == topic


def test_a_span_and_what_was_stored_are_the_same_after_they_were_sent() -> None:
    span, stored = Span(3, 1, 9), Appended(Partition("orders", 1), Position(3, 9), 2, duplicate=True)
    assert responses.PartitionSpan.of(span).span() == span
    assert responses.Stored.of(stored).appended() == stored
