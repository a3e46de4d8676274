"""What a broker logs, on standard error: with time and level, and with colours on a terminal."""

import contextlib
import logging
import sys
import time
from collections.abc import Iterator

from rich.console import Console, ConsoleRenderable
from rich.highlighter import NullHighlighter
from rich.logging import RichHandler

from shardyard.cli.output import printable_lines


@contextlib.contextmanager
def logs_on_stderr() -> Iterator[None]:
    """Within the block, what Shardyard logs from INFO on, and what others log from WARNING on, is on standard error."""
    handler = _for_terminals() if sys.stderr.isatty() else _for_pipes()
    root, ours = logging.getLogger(), logging.getLogger("shardyard")
    before = ours.level
    root.addHandler(handler)
    ours.setLevel(logging.INFO)
    try:
        yield
    finally:
        ours.setLevel(before)
        root.removeHandler(handler)


class _TerminalHandler(RichHandler):
    """Escapes what a terminal would obey: errors may quote what others wrote."""

    def render_message(self, record: logging.LogRecord, message: str) -> ConsoleRenderable:
        return super().render_message(record, printable_lines(message))


def _for_terminals() -> logging.Handler:
    return _TerminalHandler(
        console=Console(stderr=True),
        show_path=False,
        omit_repeated_times=False,
        highlighter=NullHighlighter(),
        log_time_format="%X",
    )


def _for_pipes() -> logging.Handler:
    formatter = logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s")
    formatter.converter = time.gmtime
    formatter.default_time_format, formatter.default_msec_format = "%Y-%m-%dT%H:%M:%S", "%s.%03dZ"
    handler = logging.StreamHandler()
    handler.setFormatter(formatter)
    return handler
