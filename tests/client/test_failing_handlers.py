"""Handlers that raise: what is logged, and what the dead letter keeps."""

import logging
from collections.abc import Callable
from typing import Any

import pytest

from shardyard.client import Message
from shardyard.client.failures import KINDS, TRACEBACK_SECONDS, HandlerFailure, LoggedKinds
from shardyard.wire.headers import TRACEBACK_BYTES
from tests.queues.setup import Cluster, run, running


def charge(message: Message) -> None:
    raise ValueError(f"no such customer: {message.value.decode()}")


async def bill(message: Message) -> None:
    charge(message)


def bill_in_a_thread(message: Message) -> None:
    charge(message)


@pytest.mark.parametrize("handler", [bill, bill_in_a_thread])
def test_each_attempt_is_logged_the_first_with_its_traceback_and_the_dead_letter_keeps_the_last_one(
    handler: Any, caplog: pytest.LogCaptureFixture
) -> None:
    letters: list[dict[str, Any]] = []

    async def scenario(cluster: Cluster) -> None:
        await cluster.topic(partitions=1)
        await cluster.set(backoff=[0.05])
        await cluster.do("POST", "/v1/topics/orders/records", {"value": "ann", "id": "order-1"})

        async def died() -> bool:
            letters[:] = await cluster.get("/v1/groups/billing/dead", topic="orders")
            return bool(letters)

        async with running(cluster.consumer("m1"), handler):
            await cluster.until(died)

    run(scenario)
    logged = [record for record in caplog.records if record.name == "shardyard.client.failures"]
    assert [(record.levelno, record.getMessage()) for record in logged] == [
        (
            logging.WARNING,
            (
                "the handler failed for orders/0/0 (record order-1, attempt 1), which will be retried: "
                "ValueError: no such customer: ann"
            ),
        ),
        (
            logging.ERROR,
            (
                "the handler failed for orders/0/0 (record order-1, attempt 2), which becomes a dead letter: "
                "ValueError: no such customer: ann (traceback as before)"
            ),
        ),
    ]
    (letter,) = letters
    assert letter["id"] == letter["record"]["id"] == "order-1"
    lines = letter["traceback"].splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert f"in {handler.__name__}" in lines[1], "it begins with the handler, not with what called it"
    assert lines[-1] == "ValueError: no such customer: ann"
    assert [f"in {handler.__name__}" in caplog.handler.format(record) for record in logged] == [True, False]
    assert letter["record"].get("headers", {}) == {}


def test_a_handler_that_always_fails_logs_one_traceback_for_each_place_and_one_line_for_each_record(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def fail(message: Message) -> None:
        if message.value.startswith(b"a"):
            charge(message)
        raise KeyError(f"two\nlines of {message.value.decode()}")

    async def scenario(cluster: Cluster) -> None:
        await cluster.topic(partitions=1)
        await cluster.set(backoff=[])
        async with running(cluster.consumer("m1"), fail):
            for name in ("a1", "b1", "a2", "b2", "b3", "a3"):
                await cluster.publish(name)
            await cluster.until(lambda: len(logged()) == 6)

    def logged() -> list[str]:
        return [caplog.handler.format(r) for r in caplog.records if r.name == "shardyard.client.failures"]

    run(scenario)
    assert sorted("Traceback" in text for text in logged()) == [False] * 4 + [True] * 2
    assert ["\n" in text for text in logged()] == ["Traceback" in text for text in logged()]
    assert all(f"of {name}" in caplog.text for name in ("b1", "b2", "b3"))


def failure_of(call: Callable[[], object]) -> HandlerFailure:
    try:
        call()
    except Exception as error:  # noqa: BLE001 it is the failure
        return HandlerFailure.of(error)
    raise AssertionError("it did not fail")


def test_a_traceback_is_logged_again_after_a_while_and_the_kinds_that_are_remembered_are_limited() -> None:
    kinds = LoggedKinds()
    division, number = failure_of(lambda: 1 / 0), failure_of(lambda: int("x"))
    assert [kinds.add(division, now) for now in (0.0, 1.0, TRACEBACK_SECONDS - 1)] == [True, False, False]
    assert kinds.add(number, 1.0)
    assert [kinds.add(division, now) for now in (TRACEBACK_SECONDS, TRACEBACK_SECONDS + 1)] == [True, False]
    for kind in range(2 * KINDS):
        assert kinds.add(HandlerFailure("why", "trace", None, kind), TRACEBACK_SECONDS)
    assert len(kinds._logged_at) == KINDS
    assert kinds.add(HandlerFailure("the handler was cancelled"), 0.0)


def test_only_the_end_of_a_long_traceback_is_kept_in_whole_characters() -> None:
    notes = ValueError("é" * 10)
    notes.add_note("é" * TRACEBACK_BYTES)
    notes.add_note("ü")
    failure = HandlerFailure.of(ExceptionGroup("several", [notes]))
    assert len(failure.traceback.encode()) in (TRACEBACK_BYTES, TRACEBACK_BYTES - 1)
    assert failure.traceback.rstrip().endswith("-" * 36)
    assert "é" * 100 in failure.traceback


def test_a_long_message_leaves_room_for_the_place_where_the_error_was_raised() -> None:
    def handler() -> None:
        raise ValueError("é" * TRACEBACK_BYTES)

    failure = failure_of(handler)
    assert 'raise ValueError("é" * TRACEBACK_BYTES)' in failure.traceback
    assert failure.traceback.endswith("é [...]\n")
    assert TRACEBACK_BYTES // 2 < len(failure.traceback.encode()) <= TRACEBACK_BYTES


@pytest.mark.parametrize("text", ["x" * 10**6, "file \udcff"])
def test_an_error_that_is_huge_or_cannot_be_encoded_is_logged_in_part(
    text: str, caplog: pytest.LogCaptureFixture
) -> None:
    try:
        raise ValueError(text)
    except ValueError as error:
        HandlerFailure.of(error).log("orders/0/0", "a", 1, last=False)
    assert len(caplog.text.encode()) < 2 * TRACEBACK_BYTES
    assert caplog.text.endswith(("xxx [...]\n\n", "ValueError: file ?\n\n"))


def test_an_error_that_cannot_be_shown_is_logged_all_the_same(caplog: pytest.LogCaptureFixture) -> None:
    class Unprintable(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no text")

    try:
        raise Unprintable
    except Unprintable as error:
        failure = HandlerFailure.of(error)
    failure.log("orders/0/0", "a", 1, last=True)
    assert failure.reason == "Unprintable, whose message can't be shown"
    assert "test_an_error_that_cannot_be_shown" in failure.traceback
    assert "attempt 1" in caplog.text


@pytest.mark.parametrize("settings", [{"broadcast": True}, {"backoff": []}])
def test_a_record_that_is_not_retried_is_logged_as_an_error_at_once(
    settings: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario(cluster: Cluster) -> None:
        await cluster.topic(partitions=1)
        await cluster.set(**settings)
        async with running(cluster.consumer("m1"), bill):
            await cluster.publish("ann")
            await cluster.until(lambda: "which becomes a dead letter" in caplog.text)
        assert "which will be retried" not in caplog.text

    run(scenario)
