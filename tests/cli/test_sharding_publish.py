"""What `exchanges publish` says of messages whose fate is not known."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from shardyard.cli.sharding import publish
from shardyard.model import RetryLater, ShardyardError
from shardyard.model.sharding import OutgoingMessage


class FailingExchange:
    """Its brokers are gone after some batches."""

    def __init__(self, batches: int) -> None:
        self._left = batches

    async def publish_batch(self, messages: list[OutgoingMessage], *, mandatory: bool) -> list[int]:  # noqa: ARG002
        if not self._left:
            raise RetryLater("no broker could be reached")
        self._left -= 1
        return [1] * len(messages)


async def batches_of_three() -> AsyncIterator[list[bytes]]:
    while True:
        yield [b"a", b"b", b"c"]


@pytest.mark.parametrize("before", [0, 2])
def test_an_error_says_what_was_published_and_what_may_have_been(before: int, monkeypatch: pytest.MonkeyPatch) -> None:
    class Client:
        def exchange(self, _: str) -> FailingExchange:
            return FailingExchange(before)

    def with_client(_: object, work: Any) -> None:
        asyncio.run(work(Client()))

    monkeypatch.setattr(publish, "with_client", with_client)
    publishing = publish._Publishing("images", OutgoingMessage(b"", ""), mandatory=False)
    expected = f"the first {3 * before} messages were published; the next 3 may have been, too"
    with pytest.raises(ShardyardError, match=expected):
        publishing.run(None, batches_of_three())
