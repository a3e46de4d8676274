"""Running several processes of the same command, each on a port of its own."""

import signal
import subprocess
import sys
import time
from types import FrameType

from shardyard.model import InvalidValue

RESTART_SECONDS = 1.0
"""Before a process that has ended by itself is started again."""
LOOK_SECONDS = 0.1


def run_processes(count: int, port: int) -> None:
    """Run this command `count` times with one process each, on `port` and the ports after it, until interrupted. A
    process that ends by itself is started again."""
    if port == 0 or port + count > 65536:
        raise InvalidValue("--port", port, f"a port with {count - 1} free ports after it")
    commands = [[sys.executable, "-m", "shardyard.cli", *_for_one(sys.argv[1:], port + i)] for i in range(count)]
    running: list[subprocess.Popen[bytes]] = []
    started = [time.monotonic()] * count
    stopping = False

    def stop(_: int, __: FrameType | None) -> None:
        nonlocal stopping
        stopping = True

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    running += [subprocess.Popen(command) for command in commands]  # noqa: S603 the same command
    while not stopping:
        time.sleep(LOOK_SECONDS)
        for i, process in enumerate(running):
            if process.poll() is None or stopping or time.monotonic() - started[i] < RESTART_SECONDS:
                continue
            sys.stderr.write(
                f"the server on port {port + i} has ended with {process.returncode}, and is started again\n"
            )
            running[i], started[i] = subprocess.Popen(commands[i]), time.monotonic()  # noqa: S603 likewise
    for process in running:
        if process.poll() is None:
            process.terminate()
    for process in running:
        process.wait()


def _for_one(arguments: list[str], port: int) -> list[str]:
    """The arguments of the command for one process, on this port."""
    kept: list[str] = []
    skip = False
    for argument in arguments:
        if skip:
            skip = False
        elif argument in ("--processes", "--port", "-p"):
            skip = True
        elif not argument.startswith(("--processes=", "--port=")):
            kept.append(argument)
    return [*kept, "--port", str(port)]
