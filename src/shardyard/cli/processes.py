"""Running several processes of the same command, each on a port of its own."""

import os
import signal
import subprocess
import sys
import time
from types import FrameType

from shardyard.cli.serving import at_end_of_input, listening_socket
from shardyard.model import InvalidValue

RESTART_SECONDS = 1.0
"""Before a process that has ended by itself is started again."""
START_SECONDS = 30.0
"""How long a process that ends may not have begun to listen."""
LOOK_SECONDS = 0.1
_IS_CHILD = "SHARDYARD_STOPS_WITH_PARENT"
"""The environment variable of a process that stops at the end of its standard input."""


def run_processes(count: int, host: str, port: int) -> None:
    """Run this command `count` times with one process each, on `port` and the ports after it, until interrupted. A
    process that ends by itself is started again, unless that is at the start because another program has its port."""
    if port == 0 or port + count > 65536:
        raise InvalidValue("--port", port, f"a port with {count - 1} free ports after it")
    for i in range(count):
        check_port(host, port + i)
    stopping = False

    def stop(_: int, __: FrameType | None) -> None:
        nonlocal stopping
        stopping = True

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    running: list[_Process] = []
    try:
        running.extend(_Process(host, port + i) for i in range(count))  # if one fails, those before it are stopped
        while not stopping:
            time.sleep(LOOK_SECONDS)
            for process in running:
                if not stopping:
                    process.restart_if_ended()
    finally:
        for process in running:
            process.terminate()
        for process in running:
            process.wait()


class _Process:
    """This command on one port."""

    def __init__(self, host: str, port: int) -> None:
        self._host = host
        self._port = port
        self._command = [sys.executable, "-m", "shardyard.cli", *_for_one(sys.argv[1:], port)]
        self._begun = time.monotonic()
        self._start()

    def _start(self) -> None:
        self._started = time.monotonic()
        self._process = subprocess.Popen(  # noqa: S603 the same command
            self._command, stdin=subprocess.PIPE, env={**os.environ, _IS_CHILD: "1"}
        )

    def restart_if_ended(self) -> None:
        """Raises an error if it could not start because its port was taken since it was looked at."""
        now = time.monotonic()
        if self._process.poll() is None or now - self._started < RESTART_SECONDS:
            return
        if now - self._begun < START_SECONDS:
            check_port(self._host, self._port)
        code = self._process.returncode
        sys.stderr.write(f"the server on port {self._port} has ended with {code}, and is started again\n")
        self.wait()
        self._start()

    def terminate(self) -> None:
        if self._process.poll() is None:
            self._process.terminate()

    def wait(self) -> None:
        self._process.communicate()  # which closes its standard input


def stop_with_parent() -> None:
    """Stop as by SIGTERM when the process has ended that started this one by `run_processes`, however that happened."""
    if os.environ.pop(_IS_CHILD, None):
        at_end_of_input(lambda: signal.raise_signal(signal.SIGTERM))


def check_port(host: str, port: int) -> None:
    """Raise what a server would that can't listen there."""
    listening_socket(host, port, 1).close()


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
