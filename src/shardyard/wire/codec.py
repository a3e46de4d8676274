"""Encoding and decoding of bodies in JSON and MessagePack, and of the names of partitions in them."""

import functools
import re
from typing import TypeVar

import msgspec

from shardyard.model import InvalidValue, Malformed, Partition
from shardyard.wire.media import JSON, MSGPACK

T = TypeVar("T")

_INDEX = re.compile(r"[0-9]{1,9}")


def decode(body: bytes, kind: type[T], media: str = JSON) -> T:
    """The content of a body in JSON or MessagePack. `Malformed` says what is wrong with it, and where."""
    try:
        if media == MSGPACK:
            return msgspec.msgpack.decode(body, type=kind)
        return msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Malformed("body", str(error).replace("`$.", "`")) from None


def encode(content: object, media: str = JSON) -> bytes:
    """A body in JSON or MessagePack."""
    return msgspec.msgpack.encode(content) if media == MSGPACK else msgspec.json.encode(content)


@functools.lru_cache(4096)
def parse_partition(name: str) -> Partition:
    """The partition of a name such as `orders/3`."""
    topic, slash, index = name.rpartition("/")
    if not slash or not topic or not _INDEX.fullmatch(index):
        raise InvalidValue("partition", name, "a topic and an index, such as orders/3")
    return Partition(topic, int(index))
