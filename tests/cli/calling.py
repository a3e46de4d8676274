"""The command, called in this process: quick, and a job of the pipeline finds the Spark session that is there."""

import sys

import pytest

from shardyard.cli import main


def called(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> object:
    """The exit code."""
    monkeypatch.setattr(sys, "argv", ["shardyard", *arguments])
    with pytest.raises(SystemExit) as exit_:
        main()
    return exit_.value.code
