"""The jars of Delta Lake: how they are installed, and what is said when they are missing."""

from pathlib import Path

import pyspark
import pytest

from shardyard.model import InvalidCall, ShardyardError
from shardyard.pipeline import delta_jars
from shardyard.pipeline.delta_jars import MissingDelta, delta_settings, install, jar_folder

MAVEN = """#!/bin/sh
for argument; do case $argument in -DoutputDirectory=*) folder=${argument#*=};; esac; done
echo jar >"$folder/delta.jar"
"""


@pytest.fixture
def maven(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a program that takes Maven's place is looked for. The cache is empty."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "mvn"


def write(path: Path, script: str) -> None:
    path.write_text(script)
    path.chmod(0o755)


def test_maven_downloads_the_jars_once_and_new_sessions_have_them(maven: Path) -> None:
    write(maven, MAVEN)
    assert delta_settings() == {}
    folder = install()
    assert [path.name for path in folder.parent.iterdir()] == [jar_folder().name]
    maven.unlink()
    assert install() == folder
    assert delta_settings()["spark.jars"] == str(folder / "delta.jar")


def test_a_download_that_fails_leaves_nothing_and_says_why_in_one_line(maven: Path) -> None:
    with pytest.raises(InvalidCall, match=r"^Maven is missing, .*: apt-get install maven$"):
        install()
    write(maven, "#!/bin/sh\necho '[ERROR] no route to host'\necho '[ERROR] more'\nexit 1\n")
    with pytest.raises(ShardyardError, match=r"^Maven could not download .*: \[ERROR\] no route to host$"):
        install()
    assert not list(jar_folder().parent.iterdir())


def test_the_error_for_missing_jars_says_what_to_do(maven: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not maven.exists()
    assert "its jars are missing: run `shardyard pipeline install-delta`, or use" in str(MissingDelta())
    monkeypatch.setattr(pyspark, "__version__", "4.3.0")
    assert f"it is made for Spark {delta_jars.SPARK}, and this is 4.3.0: pip install" in str(MissingDelta())
    with pytest.raises(MissingDelta):
        install()
