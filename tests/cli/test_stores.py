"""Where stores are that were not named."""

from pathlib import Path

import pytest

from shardyard.cli.stores import default_store
from shardyard.model import Conflict


def test_a_store_is_beside_the_other_one_unless_only_an_earlier_version_has_stored_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    expected = "sqlite:///other/registry.db"
    assert default_store("--registry", "log", "sqlite:///other/log", "registry.db") == expected
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "registry.db").touch()
    assert default_store("--registry", "log", "sqlite:///other/log", "registry.db") == expected, "a new log"
    (tmp_path / "other" / "log").mkdir(parents=True)
    with pytest.raises(Conflict, match=r"--registry sqlite:///other/registry.db or --registry sqlite:///data/registry"):
        default_store("--registry", "log", "sqlite:///other/log", "registry.db")
    (tmp_path / "other" / "registry.db").touch()
    assert default_store("--registry", "log", "sqlite:///other/log", "registry.db") == expected


def test_a_store_of_a_database_is_in_it() -> None:
    url = "postgresql://host/yard"
    assert default_store("--registry", "log", url, "registry.db") == url
