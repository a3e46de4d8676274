"""`shardyard check`: how evenly a hash spreads ids."""

import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import numpy as np
import numpy.typing as npt
import typer
from rich.console import Console
from rich.progress import Progress

from shardyard.cli.output import Count, Json, print_json, print_table
from shardyard.cli.place import HashName, PartitionerName
from shardyard.model import InvalidValue
from shardyard.placement import DEFAULT_HASH, ID_KINDS, Balance, Partitioner, balance, generate_ids, partitioner_named

MOST_PARTITIONS = 10_000_000


def check(
    hash_name: HashName = None,
    keys: Annotated[int, Count("--keys", help="How many ids to try.")] = 100_000_000,
    partitions: Annotated[int, Count("--partitions", "-p", help="How many partitions there are.")] = 1000,
    ids: Annotated[str, typer.Option("--ids", help=f"What ids look like: one of {', '.join(ID_KINDS)}.")] = "dense",
    partitioner: PartitionerName = "modulus",
    plot: Annotated[
        Path | None, typer.Option("--plot", help="Draw load per partition into this PNG, SVG or PDF.")
    ] = None,
    json: Json = False,
) -> None:
    """Count how many ids each partition gets, and say how even that is.

    A good hash has a chi-square per degree of freedom near 1 on every kind of ids.

    Examples:

      shardyard check --hash fnv1a32 --keys 100000000 --partitions 1000

      shardyard check --hash xxh64 --ids snowflake --keys 10000000 --plot load.png
    """
    if plot is not None:
        _check_plot(plot)
    if partitions > MOST_PARTITIONS:
        raise InvalidValue("partitions", partitions, f"at most {MOST_PARTITIONS} to count")
    started = time.perf_counter()
    rule = partitioner_named(partitioner, partitions, hash_name)
    counts = count_ids(rule, ids, keys)
    seconds = time.perf_counter() - started
    figures = balance(counts)
    row = {
        "hash": DEFAULT_HASH[partitioner] and (hash_name or DEFAULT_HASH[partitioner]),  # round_robin has none
        "partitions": partitions,
        "keys": keys,
        "ids": ids,
        **asdict(figures),
        "seconds": round(seconds, 3),
    }
    if plot is not None:
        draw(counts, figures, f"{keys:,} {ids} ids, {row['hash']}, {partitions:,} partitions", plot)
    if json:
        print_json(row)
    else:
        print_table([{"figure": name, "value": value} for name, value in row.items()])
        if plot is not None:
            Console(stderr=True).print(f"drawn into {plot}")


def count_ids(rule: Partitioner, kind: str, keys: int) -> npt.NDArray[np.int64]:
    """How many of that many ids each partition gets; with a progress bar on a terminal."""
    counts = np.zeros(rule.partitions, np.int64)
    chunks = generate_ids(kind, keys)
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(f"placing {keys:,} ids", total=keys)
        for chunk in chunks:
            counts += np.bincount(rule.place_array(chunk).to_numpy(), minlength=rule.partitions)
            progress.advance(task, len(chunk))
    return counts


def _check_plot(path: Path) -> None:
    """Complain about a plot that cannot be drawn before the work, not after it."""
    if path.suffix not in (".png", ".svg", ".pdf"):
        raise InvalidValue("--plot", str(path), "a file name that ends in .png, .svg or .pdf")
    if not path.parent.is_dir():
        raise InvalidValue("--plot", str(path), "a file in a folder that exists")
    try:
        path.open("ab").close()
    except OSError:
        raise InvalidValue("--plot", str(path), "a file that can be written") from None
    try:
        import matplotlib.figure  # noqa: F401, PLC0415 an optional extra
    except ImportError:
        raise InvalidValue("--plot", str(path), "matplotlib to draw it: pip install 'shardyard[plot]'") from None


def draw(counts: npt.NDArray[np.int64], figures: Balance, title: str, path: Path) -> None:
    """Load per partition, and beside it how many partitions have which load."""
    from matplotlib.figure import Figure  # noqa: PLC0415 an optional extra, and slow to import

    mean = float(counts.mean())
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    load, spread = figure.subplots(1, 2, sharey=True, width_ratios=(4, 1))
    load.bar(np.arange(len(counts)), counts, width=1.0, color="#4c78a8")
    load.axhline(mean, color="#e45756", linewidth=1.2, label=f"mean {mean:,.0f}")
    low, high = float(counts.min()), float(counts.max())
    margin = max((high - low) * 0.15, mean * 0.0005, 1.0)
    load.set_ylim(max(low - margin, 0), high + margin)
    load.set_xlim(-0.5, len(counts) - 0.5)
    load.set(xlabel="partition", ylabel="ids")
    load.legend(loc="upper right")
    spread.hist(counts, bins=40, orientation="horizontal", color="#4c78a8")
    spread.axhline(mean, color="#e45756", linewidth=1.2)
    spread.set(xlabel="partitions")
    figure.suptitle(
        f"{title}\nmax/mean {figures.max_over_mean:.4f}, chi²/df {figures.chi2_per_df:.3f}, "
        f"total deviation {figures.total_deviation:,.0f}, max {figures.max_deviation:,.0f}",
        fontsize=11,
    )
    figure.savefig(path, dpi=120)
