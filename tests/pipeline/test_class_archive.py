"""The archive of Spark's classes: made once by a command, and used by the JVMs of later sessions."""

import os
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from shardyard.pipeline.cache import cache_folder
from shardyard.pipeline.jvm.class_archive import ClassArchive

SESSION = """
import sys
from shardyard.pipeline.jvm.class_archive import ClassArchive
from shardyard.pipeline.session import session

options = f"{ClassArchive().use()} -Xlog:class+load:file={sys.argv[1]}"
print(session("archive", master="local[1]", memory="1g", java_options=options).range(5).count())
"""


def test_an_archive_is_used_once_it_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    archive = ClassArchive()
    assert archive.use() == ""
    option = archive.use_or_make().split()[-1]
    assert option.startswith(f"-XX:ArchiveClassesAtExit={tmp_path}/shardyard/classes-")
    made = Path(option.partition("=")[2].replace(f".{os.getpid()}.draft", ".jsa"))
    made.touch()
    assert archive.use() == archive.use_or_make()
    assert archive.use().split()[-1] == f"-XX:SharedArchiveFile={made}"
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    assert ClassArchive().use() == ""  # another Java cannot use it


def test_without_a_home_the_cache_is_a_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    assert cache_folder().parent == tmp_path


@pytest.mark.spark
@pytest.mark.timeout(300)
def test_the_first_command_makes_the_archive_and_later_sessions_load_classes_from_it(tmp_path: Path) -> None:
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    pq.write_table(pa.table({"key": ["a", "b", "a"]}), tmp_path / "keys.parquet")
    command = [str(Path(sys.executable).with_name("shardyard")), "pipeline", "balance", "--master", "local[1]"]
    command += ["--memory", "1g", "--parquet", str(tmp_path / "keys.parquet"), "--json"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    made = [path.name.partition("-")[0] for path in (tmp_path / "cache" / "shardyard").iterdir()]
    assert sorted(made) == ["classes", "functions"]
    log = tmp_path / "classes.log"
    done = subprocess.run(
        [sys.executable, "-c", SESSION, str(log)], env=environment, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "5\n", "")
    assert "org.apache.spark.SparkContext source: shared objects file (top)" in log.read_text()
