"""Shared by the benchmarks: pinning to two cores, percentiles, tables."""

import os
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

CORES = 2


def pin_to_cores() -> str:
    """Pin this process, and everything it starts from now on, to two cores; return a description for the report."""
    cores = set(sorted(os.sched_getaffinity(0))[:CORES])
    os.sched_setaffinity(0, cores)
    return f"{len(cores)} of {os.cpu_count()} cores, load average before the run {os.getloadavg()[0]:.1f}"


def percentile(values: Sequence[float], percent: float) -> float:
    """The value below which `percent` % of the values lie; nan if there are none."""
    return float(np.percentile(values, percent)) if len(values) else float("nan")


def milliseconds(values: Sequence[float], *percents: float) -> str:
    """Percentiles of durations in seconds, formatted as milliseconds."""
    return " / ".join(f"{percentile(values, percent) * 1e3:.1f}" for percent in percents)


def rate(per_second: float) -> str:
    """A rate with its unit prefix, to about three digits."""
    for size, unit in ((1e6, " M"), (1e3, " k")):
        if per_second >= size:
            digits = 2 if per_second < 10 * size else 1 if per_second < 100 * size else 0
            return f"{per_second / size:.{digits}f}{unit}"
    return f"{per_second:.0f}"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print rows in columns, the first one left-aligned and the others right-aligned."""
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]
    for row in (head, ["-" * width for width in widths], *rows):
        others = (f"{cell:>{width}}" for cell, width in zip(row[1:], widths[1:], strict=True))
        print("  ".join([row[0].ljust(widths[0]), *others]).rstrip())


def filesystem(folder: Path) -> str:
    """The type and the device of the filesystem that a folder is on."""
    best = ("", "unknown")
    for line in Path("/proc/mounts").read_text().splitlines():
        device, mount, kind = line.split()[:3]
        if folder.resolve().is_relative_to(mount) and len(mount) >= len(best[0]):
            best = (mount, f"{kind} on {device}")
    return best[1]


def sync_seconds(folder: Path, times: int = 100) -> float:
    """The median time to sync 4 KiB to disk: the lower bound for every write that survives a power cut."""
    path = folder / "sync-probe"
    seconds = []
    with path.open("wb", buffering=0) as file:
        for _ in range(times):
            file.write(os.urandom(4096))
            start = time.perf_counter()
            os.fdatasync(file.fileno())
            seconds.append(time.perf_counter() - start)
    path.unlink()
    return percentile(seconds, 50)
