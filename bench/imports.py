"""How long it takes to import the client and to show a command's help, how much memory a broker takes after its start,
and how much each extra installs.

Run it with `make bench` or `python -m bench.imports`; `bench/README.md` explains how each figure is measured. The
sizes, for which packages are downloaded, are measured only with `--sizes`.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bench.figures import table
from tests.queues.brokers import BrokerProcess

ROUNDS = 9
SETTLE_SECONDS = 5.0
"""After which the background tasks of a broker have run once."""
ROOT = Path(__file__).parent.parent
PROGRAMS = {
    "Python alone": ["-c", ""],
    "import shardyard.client": ["-c", "import shardyard.client"],
    "the same, and connect (which imports aiohttp)": ["-c", "import shardyard.client.http"],
    "shardyard --help": ["-m", "shardyard.cli", "--help"],
    "shardyard publish --help": ["-m", "shardyard.cli", "publish", "--help"],
}
EXTRAS = ("", "[server]", "[postgresql]", "[plot]", "[pipeline]", "[all]")


def seconds(program: list[str]) -> list[float]:
    """How long each of several runs of the program took, in a fresh interpreter, after one run to warm up."""
    taken = []
    for _ in range(ROUNDS + 1):
        start = time.perf_counter()
        subprocess.run([sys.executable, *program], check=True, stdout=subprocess.DEVNULL)
        taken.append(time.perf_counter() - start)
    return taken[1:]


def broker_memory() -> int:
    """The bytes that a broker takes when all of it is running, before its first record."""
    with tempfile.TemporaryDirectory(prefix="shardyard-bench-") as folder, BrokerProcess(Path(folder)) as broker:
        broker.listens()
        time.sleep(SETTLE_SECONDS)
        return broker.resident_bytes


def megabytes(folder: Path) -> float:
    """What the files in a folder take on disk."""
    return sum(path.lstat().st_blocks * 512 for path in folder.rglob("*")) / 2**20


def installed_size(extra: str) -> float:
    """The megabytes that an extra installs into a fresh virtual environment without pip."""
    with tempfile.TemporaryDirectory(prefix="shardyard-bench-") as folder:
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
        pip = [
            sys.executable,
            "-m",
            "pip",
            "--quiet",
            "--disable-pip-version-check",
            "--python",
            f"{folder}/bin/python",
        ]
        constraints = {"PIP_CONSTRAINT": str(ROOT / "constraints.txt")}
        subprocess.run([*pip, "install", f"{ROOT}{extra}"], check=True, env=os.environ | constraints)
        return sum(map(megabytes, Path(folder).glob("lib/python*/site-packages")))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", action="store_true", help="also install each extra, and measure its size")
    options = parser.parse_args()
    measured = {name: seconds(program) for name, program in PROGRAMS.items()}
    table(
        ("program", "best", "median"),
        [(name, f"{min(taken):.2f} s", f"{statistics.median(taken):.2f} s") for name, taken in measured.items()],
    )
    print(f"a broker before its first record: {broker_memory() / 1e6:.0f} MB")
    if options.sizes:
        for extra in EXTRAS:
            print(f"pip install shardyard{extra}: {installed_size(extra):.0f} MB", flush=True)
