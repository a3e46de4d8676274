"""Damages messages of clients and messaging servers at random and has them decoded: `python -m
tests.messaging.frame_damage SEED COUNT`.

What comes out are frames or `Malformed`, nothing else, and it takes little time and memory whatever the bytes declare.
"""

import contextlib
import random
import resource
import sys
import time

from shardyard.model import Malformed
from shardyard.wire.channels import ChannelEvent, change, decode_event, encode_event, parse_change, parse_source
from shardyard.wire.inbox import InboxEntry, Mark, decode_entry, encode_entry
from shardyard.wire.messaging import Format, decode_from_client, decode_from_server, encode
from tests.wire import frame_damage
from tests.wire.frame_damage import MAX_BYTES, MAX_SECONDS, garbage
from tests.wire.messaging_samples import FROM_CLIENT, FROM_SERVER

FRAGMENTS = (
    b'"',
    b"{",
    b"[",
    b"\\u0000",
    b"\\ud800",
    b"\xff",
    b"\xed\xa0\x80",
    b"null",
    b"-1",
    b"1e999",
    b"9" * 400,
    b'"type":"send",',
    b"[" * 20_000,
    b'{"type":' * 5_000,
)
"""What JSON may choke on."""


def whole_messages(format_: Format) -> list[bytes]:
    """Of clients and of servers, one frame and many."""
    made = []
    for samples in (FROM_CLIENT, FROM_SERVER):
        frames = [frame for frame, *_ in samples]
        made += [encode(each, format_) for each in (frames, frames * 3, *frames)]
    return made


def damaged(message: bytes, format_: Format, chance: random.Random) -> bytes:
    if format_ is Format.JSON and chance.random() < 0.7:
        data = bytearray(message)
        for _ in range(chance.choice((1, 1, 2, 5))):
            at = chance.randrange(len(data))
            data[at : at + chance.choice((0, 0, 1, 4, 20))] = chance.choice(FRAGMENTS)
        return bytes(data)
    return frame_damage.damaged(message, chance)


def decode(message: bytes, format_: Format) -> bool:
    """Whether it is valid in one of the directions."""
    valid = False
    for decoder in (decode_from_client, decode_from_server):
        began = time.perf_counter()
        with contextlib.suppress(Malformed):
            decoder(message, format_)
            valid = True
        assert time.perf_counter() - began < MAX_SECONDS, message[:100].hex(" ")
    return valid


def main(seed: int, count: int) -> None:
    chance = random.Random(seed)
    whole = {format_: whole_messages(format_) for format_ in Format}
    assert all(decode(message, format_) for format_, messages in whole.items() for message in messages)
    entries = [
        encode_entry(InboxEntry(2484, "alice", "bob", "phone", 7, 5, "hi")),
        encode_entry(InboxEntry(2485, "bob", "alice", "desk", 1, 5, Mark("seen", 2484), copy=True)),
    ]
    event = encode_event(ChannelEvent(2487, "bob", "phone", 7, 5, "hi"))
    taken = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    valid = 0
    for number in range(count):
        format_ = chance.choice(list(Format))
        message = garbage(chance) if chance.random() < 0.1 else damaged(chance.choice(whole[format_]), format_, chance)
        valid += decode(message, format_)
        if number % 10 == 0:
            with contextlib.suppress(Malformed):
                decode_entry(frame_damage.damaged(chance.choice(entries), chance))
            with contextlib.suppress(Malformed):
                decode_event(frame_damage.damaged(event, chance))
            with contextlib.suppress(Malformed):
                parse_change(frame_damage.damaged(change("alice", added=True), chance))
            with contextlib.suppress(Malformed):
                parse_source(frame_damage.damaged(b"fanout.17.3.2484.99", chance).decode(errors="replace"))
    added = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - taken
    assert added < MAX_BYTES, f"decoding took {added >> 20} MB"
    assert valid < count, "nothing was damaged"
    print(f"{count} damaged messages of messaging: {valid} were valid all the same, {added >> 20} MB more")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
