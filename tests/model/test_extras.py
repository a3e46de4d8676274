"""What is not installed is said in one line, with the command that installs it."""

import sys
from collections.abc import Callable

import pytest

import shardyard.log
import shardyard.placement
import shardyard.server
from shardyard.log import open_log
from shardyard.model import InvalidCall, MissingExtra, Partition, Record
from shardyard.model.extras import MODULES, lazy_exports, require
from shardyard.model.plain_batch import PlainBatch
from shardyard.placement import balance
from shardyard.registry import open_registry
from tests.cli.invocation import invoke

POSTGRESQL = "postgresql://user@host/database"


def block(monkeypatch: pytest.MonkeyPatch, *modules: str) -> None:
    """Let imports of these modules fail as if they were not installed."""
    for module in modules:
        monkeypatch.setitem(sys.modules, module, None)


@pytest.mark.parametrize(
    ("call", "extra", "what"),
    [
        (lambda: open_log("memory://"), "server", "open_log"),
        (lambda: open_log("sqlite:///data/log"), "server", "open_log"),
        (lambda: open_registry("memory://"), "server", "open_registry"),
        (lambda: balance([1, 2]), "server", "balance"),
        (
            lambda: PlainBatch(Partition("t", 0), 1, 0, 1, [Record("a", None, b"")]).data,
            "server",
            "a batch as an Arrow",
        ),
        (lambda: open_log(POSTGRESQL), "postgresql", "a log at postgresql://"),
        (lambda: open_registry(POSTGRESQL), "postgresql", "a registry at postgresql://"),
    ],
)
def test_a_call_that_needs_an_extra_names_it(
    monkeypatch: pytest.MonkeyPatch, call: Callable[[], object], extra: str, what: str
) -> None:
    block(monkeypatch, *MODULES[extra])
    with pytest.raises(MissingExtra) as caught:
        call()
    assert caught.value.extra == extra
    assert caught.value.what.startswith(what)
    assert f"needs the {extra} packages: pip install 'shardyard[{extra}]'" in str(caught.value)
    assert isinstance(caught.value, InvalidCall)


@pytest.mark.parametrize(
    ("arguments", "blocked", "message"),
    [
        (("broker",), "uvicorn", "the broker needs the server packages: pip install 'shardyard[server]'"),
        (("place", "alice"), "pyarrow", "this command needs the server packages: pip install 'shardyard[server]'"),
        (("check",), "numpy", "this command needs the server packages: pip install 'shardyard[server]'"),
        (("compare", "-p", "2", "--to", "3"), "xxhash", "compare --to needs the server packages: pip install"),
        (("tour",), "pyspark", "the tour needs the pipeline packages: pip install 'shardyard[pipeline]'"),
        (("demo",), "sqlalchemy", "this command needs the server packages: pip install 'shardyard[server]'"),
        (("copy", "--from", "sqlite:///a", "--to", "sqlite:///b"), "pyarrow", "this command needs the server packages"),
        (("check", "--plot", "a.png"), "matplotlib", "--plot needs the plot packages: pip install 'shardyard[plot]'"),
        (
            ("pipeline", "plan", "--assume-records", "1", "--assume-bytes", "1"),
            "pyspark",
            "this command needs the pipeline packages: pip install 'shardyard[pipeline]'",
        ),
        (
            ("broker", "--log", POSTGRESQL, "--registry", POSTGRESQL, "--port", "0"),
            "psycopg",
            "a registry at postgresql:// needs the postgresql packages: pip install 'shardyard[postgresql]'",
        ),
    ],
)
def test_a_command_that_needs_an_extra_says_so_in_one_line_and_exits_as_for_any_invalid_call(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: tuple[str, ...],
    blocked: str,
    message: str,
) -> None:
    block(monkeypatch, blocked)
    assert invoke(monkeypatch, *arguments) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith(f"error: {message}")
    assert output.err.count("\n") == 1


def test_names_that_are_loaded_when_they_are_used_name_the_extra_and_unknown_ones_do_not_exist(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for package, name in ((shardyard.log, "Sender"), (shardyard.placement, "Modulus"), (shardyard.server, "running")):
        assert callable(getattr(package, name))
        assert name in package.__all__
        with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
            package.nothing  # noqa: B018 reading it is what fails
    block(monkeypatch, "numpy")
    load = lazy_exports("shardyard.log", {"Sender": "shardyard.log.sender"}, "numpy", "pyarrow")
    with pytest.raises(MissingExtra, match=r"shardyard.log.Sender needs the server packages"):
        load("Sender")


def test_everything_is_installed_where_the_tests_run() -> None:
    for extra in MODULES:
        require(extra, "a test")
