"""Standard input line by line, without blocking the event loop: from a terminal, a pipe or a file."""

import asyncio
import io
import os
import sys
from collections.abc import AsyncIterator

from shardyard.model import TooLarge

CHUNK_BYTES = 65536
MAX_LINE_BYTES = 128 * 1024


async def stdin_lines() -> AsyncIterator[bytes]:
    """The lines of standard input, without their ends."""
    rest = b""
    while chunk := await _read():
        *lines, rest = (rest + chunk).split(b"\n")
        if len(rest) > MAX_LINE_BYTES:
            raise TooLarge("line in bytes", len(rest), MAX_LINE_BYTES)
        for line in lines:
            yield line.removesuffix(b"\r")
    if rest:
        yield rest


async def _read() -> bytes:
    """What is there, or comes next; nothing at the end. No thread waits for it, which could not be ended."""
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
