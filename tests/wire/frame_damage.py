"""Damages messages of frames at random and has them decoded: `python -m tests.wire.frame_damage SEED COUNT`.

What comes out are frames or `Malformed`, nothing else, and it takes little time and memory whatever the bytes declare.
"""

import contextlib
import random
import resource
import sys
import time

from shardyard.model import Malformed
from shardyard.wire.frames import decode_answers, decode_calls, encode_frame, messages
from tests.wire.frame_samples import ANSWERS, CALLS

MAX_SECONDS = 1.0
"""For one message, which is small; far above what it takes."""
MAX_BYTES = 256 * 1024 * 1024
"""Of memory that decoding may add."""
HUGE = [
    bytes([kind]) + b"\xff" * width
    for kind, width in ((0xDD, 4), (0xDF, 4), (0xDC, 2), (0xC6, 4), (0xDB, 4), (0xC9, 4))
]
"""Headers of arrays, maps, bytes, strings and extensions that declare more than can follow."""
DEPTHS = (10, 1_000, 200_000)


def whole_messages() -> list[bytes]:
    """Of calls and of answers, one frame and many."""
    calls = [encode_frame(number, call) for number, call in enumerate(CALLS)]
    answers = [encode_frame(number, answer) for number, answer in enumerate(ANSWERS)]
    return [
        message
        for each in (calls, answers)
        for part in (each, each * 3, *([frame] for frame in each))
        for message in messages(part)
    ]


def damaged(message: bytes, chance: random.Random) -> bytes:
    data = bytearray(message)
    for _ in range(chance.choice((1, 1, 1, 2, 3, 8))):
        at = chance.randrange(len(data))
        match chance.randrange(10):
            case 0 | 1 | 2:
                data[at] = chance.randrange(256)
            case 3 | 4:
                data[at] ^= 1 << chance.randrange(8)
            case 5:
                data[at:at] = chance.randbytes(chance.randrange(1, 9))
            case 6:
                del data[at : at + chance.randrange(1, 9)]
            case 7:
                data[at : at + chance.choice((0, 1, 5))] = chance.choice(HUGE)
            case 8:
                data[at : at + 1] = chance.choice((b"\x91", b"\x81\xa1x", b"\x81")) * chance.choice(DEPTHS)
            case _:
                del data[max(at, 1) :]
        if not data:
            return chance.randbytes(8)
    return bytes(data)


def garbage(chance: random.Random) -> bytes:
    return chance.randbytes(chance.choice((0, 1, 2, 8, 64, 4096)))


def decode(message: bytes) -> bool:
    """Whether it is valid in one of the directions."""
    valid = False
    for decoder in (decode_calls, decode_answers):
        began = time.perf_counter()
        with contextlib.suppress(Malformed):
            valid = valid or not any(isinstance(frame, Malformed) for _, frame in decoder(message))
        assert time.perf_counter() - began < MAX_SECONDS, message[:100].hex(" ")
    return valid


def main(seed: int, count: int) -> None:
    chance = random.Random(seed)
    whole = whole_messages()
    assert all(map(decode, whole))
    taken = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    valid = 0
    for _ in range(count):
        valid += decode(garbage(chance) if chance.random() < 0.1 else damaged(chance.choice(whole), chance))
    print(f"{valid} of {count} valid")
    assert 0.02 * count < valid < 0.5 * count, "else it tests nothing"
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 < taken + MAX_BYTES


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
