"""Runs the command in this process, which is fast, and lets a pipeline job use the tests' Spark session."""

import functools
import io
import json
import sys
from typing import Any

import pytest
import typer.main

from shardyard.cli import main

build_once = functools.cache(typer.main.get_command)
"""Typer builds all commands anew whenever it is called, which takes longer than most of them."""


def invoke(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> object:
    """Run the command, and return its exit code."""
    monkeypatch.setattr(sys, "argv", ["shardyard", *arguments])
    monkeypatch.setattr(typer.main, "get_command", build_once)
    with pytest.raises(SystemExit) as exit_:
        main()
    return exit_.value.code


class Shell:
    """Runs commands in this process."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self._monkeypatch, self._capsys = monkeypatch, capsys
        self.err = ""

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
