"""Invokes the command in this process, which is fast, and lets a pipeline job use the tests' Spark session."""

import sys

import pytest

from shardyard.cli import main


def invoke(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> object:
    """Run the command, and return its exit code."""
    monkeypatch.setattr(sys, "argv", ["shardyard", *arguments])
    with pytest.raises(SystemExit) as exit_:
        main()
    return exit_.value.code
