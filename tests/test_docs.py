"""The examples of the README and of the documents are run."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


pytestmark = pytest.mark.processes
_SPARK = re.compile(r"pyspark|shardyard\.pipeline|shardyard pipeline")


def blocks(language: str) -> list[tuple[str, str]]:
    return [
        (f"{path.name}-{n}", match.group(1))
        for path in DOCUMENTS
        for n, match in enumerate(
            re.finditer(rf"^```{language}\n(.*?)^```", path.read_text(), re.DOTALL | re.MULTILINE)
        )
    ]


def cases(language: str) -> list[object]:
    """The examples. A program that opens a session needs Spark; so does a command of the pipeline."""
    return [
        pytest.param(text, id=name, marks=pytest.mark.spark if _SPARK.search(text) else ())
        for name, text in blocks(language)
    ]


@pytest.mark.timeout(300)  # some start Spark
@pytest.mark.parametrize("code", cases("python"))
def test_python_example_runs(code: str, tmp_path: Path) -> None:
    run = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr


@pytest.mark.parametrize("code", cases("console"))
def test_console_example_prints_what_it_says(code: str, tmp_path: Path) -> None:
    for part in re.split(r"^\$ ", code, flags=re.MULTILINE)[1:]:
        line, _, expected = part.partition("\n")
        command = shlex.split(line)
        assert command[0] == "shardyard"
        run = subprocess.run(
            [Path(sys.executable).with_name("shardyard"), *command[1:]],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
        assert run.returncode == 0, run.stderr
        if expected:
            assert run.stdout == expected
