"""The command of a benchmark that runs on a new embedded registry, or on one that is named."""

import argparse
import asyncio
import tempfile
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from bench.figures import pin_to_cores

Bench = Callable[[Path, str | None], Coroutine[Any, Any, None]]
"""Takes an empty folder and the URL of a registry; None: an embedded one in the folder."""


def run_alone(bench: Bench, title: str, description: str | None) -> None:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument(
        "--registry", help="the URL of the registry to measure; default: the embedded one, in a new file"
    )
    options = parser.parse_args()
    print(f"{title}: {pin_to_cores()}")
    with tempfile.TemporaryDirectory(prefix="shardyard-bench-") as folder:
        asyncio.run(bench(Path(folder), options.registry))
