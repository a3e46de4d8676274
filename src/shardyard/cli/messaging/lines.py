"""What a user types or a program writes: the lines of standard input as they come."""

from collections.abc import AsyncIterator

from shardyard.cli.stdin import line_batches

BATCH_LINES = 1000
MAX_LINE_BYTES = 128 * 1024


async def stdin_lines() -> AsyncIterator[bytes]:
    """The lines of standard input, without their ends. `TooLarge` for one of more than 128 KiB."""
    async for lines in line_batches(BATCH_LINES, MAX_LINE_BYTES):
        for line in lines:
            yield line.removesuffix(b"\r")
