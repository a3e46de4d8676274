"""SIGINT and SIGTERM for a consumer that is the main work of its process."""

import asyncio
import contextlib
import signal
import threading
from collections.abc import Callable, Iterator

from shardyard.model import InvalidCall


@contextlib.contextmanager
def stop_signals(stop: Callable[[], object]) -> Iterator[Callable[[], bool]]:
    """Within the block, SIGINT and SIGTERM call `stop` in the running event loop; a second one ends the process as
    usual. Yields a function that returns whether a signal has come."""
    if threading.current_thread() is not threading.main_thread():
        raise InvalidCall("signals reach the main thread only: run the consumer there, or without stop_on_signals")
    loop = asyncio.get_running_loop()
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    received = False

    def restore() -> None:
        for number, handler in before.items():
            if loop.remove_signal_handler(number):
                signal.signal(number, handler)

    def receive() -> None:
        nonlocal received
        received = True
        restore()
        stop()

    for number in before:
        loop.add_signal_handler(number, receive)
    try:
        yield lambda: received
    finally:
        restore()


@contextlib.contextmanager
def sigterm_as_interrupt() -> Iterator[None]:
    """Within the block, the first SIGTERM raises `KeyboardInterrupt` in the main thread, as Ctrl-C does. A handler that
    the program has set itself stays in place, and elsewhere than in the main thread nothing changes."""
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return

    def interrupt(*_: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
