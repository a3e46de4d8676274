"""Ctrl-C while a command starts: it ends with 130, and prints nothing."""

import sys
from importlib.abc import MetaPathFinder
from typing import NoReturn

import pytest

from shardyard import cli
from shardyard.__main__ import main
from shardyard.cli.queues.session import Session
from shardyard.client import Brokers


def interrupt(*_: object) -> NoReturn:
    raise KeyboardInterrupt


class Interrupted(MetaPathFinder):
    """Ctrl-C comes while this module is imported."""

    def find_spec(self, name: str, *_: object) -> None:
        if name == "shardyard.cli":
            interrupt()


def test_ctrl_c_during_the_imports(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delitem(sys.modules, "shardyard.cli")
    monkeypatch.setattr(sys, "meta_path", [Interrupted(), *sys.meta_path])
    with pytest.raises(SystemExit) as exit_:
        main()
    assert (exit_.value.code, capsys.readouterr()) == (130, ("", ""))


def test_ctrl_c_before_the_command_begins(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(cli, "app", interrupt)
    with pytest.raises(SystemExit) as exit_:
        main()
    assert (exit_.value.code, capsys.readouterr()) == (130, ("", ""))


def test_a_session_that_is_interrupted_while_it_opens_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    enter = Brokers.__aenter__

    async def enter_and_interrupt(brokers: Brokers) -> NoReturn:
        await enter(brokers)
        interrupt()

    monkeypatch.setattr(Brokers, "__aenter__", enter_and_interrupt)
    session = Session(["http://127.0.0.1:1"])
    with pytest.raises(KeyboardInterrupt):
        session.__enter__()
    assert not session.brokers.is_open
