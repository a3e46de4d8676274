"""Standard input as it comes, without blocking the event loop: from a terminal, a pipe or a file."""

import asyncio
import io
import os
import sys
from collections.abc import AsyncIterator

from shardyard.model import TooLarge

CHUNK_BYTES = 1024 * 1024


async def line_batches(max_lines: int, max_line_bytes: int) -> AsyncIterator[list[bytes]]:
    """The lines of standard input without their ends, as soon as they can be read, at most `max_lines` at once. Lines
    that came together are in one batch. `TooLarge` for a longer line, after all lines before it."""
    rest = b""
    while chunk := await _read():
        *lines, rest = (rest + chunk).split(b"\n")
        for first in range(0, len(lines), max_lines):
            yield lines[first : first + max_lines]
        if len(rest) > max_line_bytes:
            raise TooLarge("line in bytes", len(rest), max_line_bytes)
    if rest:
        yield [rest]


async def _read() -> bytes:
    """What is there, or comes next; nothing at the end. No thread waits for it, since it could not be interrupted."""
    try:
        file = sys.stdin.fileno()
    except (io.UnsupportedOperation, ValueError):  # replaced by a test
        return sys.stdin.buffer.read(CHUNK_BYTES)
    loop = asyncio.get_running_loop()
    readable = asyncio.Event()
    try:
        loop.add_reader(file, readable.set)
    except PermissionError:  # a file, which can always be read
        return os.read(file, CHUNK_BYTES)
    try:
        await readable.wait()
        return os.read(file, CHUNK_BYTES)
    finally:
        loop.remove_reader(file)
