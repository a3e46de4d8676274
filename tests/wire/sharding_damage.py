"""Damages messages of sharded queues' frames at random and has them decoded, as `frame_damage` does with the others:
`python -m tests.wire.sharding_damage SEED COUNT`."""

import contextlib
import random
import resource
import sys
import time

from shardyard.model import Malformed
from shardyard.wire.frames import messages
from shardyard.wire.sharding_frames import decode_answers, decode_calls, encode_frame
from tests.wire.frame_damage import MAX_BYTES, MAX_SECONDS, damaged, garbage
from tests.wire.sharding_samples import ANSWERS, CALLS


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
