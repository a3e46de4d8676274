"""Runs the command in this process, which is fast, and lets a pipeline job use the tests' Spark session."""

import asyncio
import functools
import io
import json
import sys
from typing import Any

import pytest
import typer.main

from shardyard.cli import main
from shardyard.runtime.clock import SystemClock

build_once = functools.cache(typer.main.get_command)
"""Typer builds all commands anew whenever it is called, which takes longer than most of them."""


def invoke(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> object:
    """Run the command, and return its exit code."""
    monkeypatch.setattr(sys, "argv", ["shardyard", *arguments])
    monkeypatch.setattr(typer.main, "get_command", build_once)
    with pytest.raises(SystemExit) as exit_:
        main()
    return exit_.value.code


class SkippingClock(SystemClock):
    """Skips the time between two attempts: a call is retried as often as it would be, for as long as it counts, at
    once."""

    def __init__(self) -> None:
        self._skipped = 0.0

    def monotonic(self) -> float:
        return super().monotonic() + self._skipped

    async def sleep(self, seconds: float) -> None:
        self._skipped += seconds
        await asyncio.sleep(0)


class Shell:
    """Runs commands in this process."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self._monkeypatch, self._capsys = monkeypatch, capsys
        self.err = ""

    def skip_waits(self) -> None:
        """From now on, do not wait before a call to brokers is retried."""
        self._monkeypatch.setattr("shardyard.client.brokers.SystemClock", SkippingClock)

    def run(self, *arguments: str, stdin: bytes = b"") -> tuple[object, str]:
        """Run a command; returns its exit code and standard output, and keeps its standard error in `err`."""
        self._monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        code = invoke(self._monkeypatch, *arguments)
        printed = self._capsys.readouterr()
        self.err = printed.err
        return code, printed.out

    def __call__(self, *arguments: str, stdin: bytes = b"") -> str:
        """Run a command that must succeed; returns its standard output."""
        code, out = self.run(*arguments, stdin=stdin)
        assert code == 0, self.err
        return out

    def json(self, *arguments: str, stdin: bytes = b"") -> Any:
        return json.loads(self(*arguments, "--json", stdin=stdin))

    def lines(self, *arguments: str) -> list[Any]:
        return [json.loads(line) for line in self(*arguments, "--json").splitlines()]
