"""`shardyard check`: how evenly a hash spreads ids over partitions."""

# ruff: noqa: PLC0415 commands start quickly: what is slow to import is imported by those that need it

import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress

from shardyard.cli.options import HashName, Json, PartitionerName, Partitions, integer_option
from shardyard.cli.output import print_json, print_message, print_table
from shardyard.model import InvalidValue
from shardyard.model.extras import require
from shardyard.placement import Balance, balance
from shardyard.placement.names import DEFAULT_HASH, ID_KINDS

if TYPE_CHECKING:
    import numpy.typing as npt

    from shardyard.placement import Partitioner

MAX_PARTITIONS = 10_000_000


def check(
    hash_name: HashName = None,
    keys: Annotated[int, integer_option("--keys", help="How many ids to place.")] = 100_000_000,
    partitions: Partitions = 1000,
    ids: Annotated[
        str, typer.Option("--ids", metavar="KIND", help=f"The kind of ids: one of {', '.join(ID_KINDS)}.")
    ] = "dense",
    partitioner_name: PartitionerName = "modulus",
    plot: Annotated[
        Path | None,
        typer.Option("--plot", metavar="FILE", help="Draw the load per partition into this PNG, SVG or PDF file."),
    ] = None,
    json: Json = False,
) -> None:
    """Place ids on partitions, and measure how evenly they are spread.

    A good hash has a chi-square per degree of freedom near 1 for every kind of ids.

    Examples:

      shardyard check --hash fnv1a32 --keys 100000000 --partitions 1000

      shardyard check --hash xxh64 --ids snowflake --keys 10000000 --plot load.png
    """
    require("server", "this command", "numpy", "pyarrow", "xxhash")
    from shardyard.placement import partitioner_named

    if plot is not None:
        _check_plot_path(plot)
    if partitions > MAX_PARTITIONS:
        raise InvalidValue("partitions", partitions, f"at most {MAX_PARTITIONS}")
    started = time.perf_counter()
    partitioner = partitioner_named(partitioner_name, partitions, hash_name)
    counts = count_ids(partitioner, ids, keys)
    seconds = time.perf_counter() - started
    measured = balance(counts)
    default_hash = DEFAULT_HASH[partitioner_name]
    row = {
        "hash": default_hash and (hash_name or default_hash),  # round_robin has none
        "partitions": partitions,
        "keys": keys,
        "ids": ids,
        **asdict(measured),
        "seconds": round(seconds, 3),
    }
    if plot is not None:
        draw_load(counts, measured, f"{keys:,} {ids} ids, {row['hash']}, {partitions:,} partitions", plot)
    if json:
        print_json(row)
    else:
        print_table([{"metric": name, "value": value} for name, value in row.items()])
        if plot is not None:
            print_message(f"plot: {plot}")


def count_ids(partitioner: "Partitioner", kind: str, keys: int) -> "npt.NDArray[Any]":
    """Place `keys` ids and count them per partition, with a progress bar on a terminal."""
    import numpy as np

    from shardyard.placement import generate_ids

    counts = np.zeros(partitioner.partitions, np.int64)
    chunks = generate_ids(kind, keys)
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(f"placing {keys:,} ids", total=keys)
        for chunk in chunks:
            counts += np.bincount(partitioner.place_array(chunk).to_numpy(), minlength=partitioner.partitions)
            progress.advance(task, len(chunk))
    return counts


def _check_plot_path(path: Path) -> None:
    """Fail before the ids are placed, rather than after, if the plot cannot be drawn or written."""
    require("plot", "--plot")
    if path.suffix not in (".png", ".svg", ".pdf"):
        raise InvalidValue("--plot", str(path), "a file name that ends in .png, .svg or .pdf")
    if not path.parent.is_dir():
        raise InvalidValue("--plot", str(path), "a file in a folder that exists")
    try:
        path.open("ab").close()
    except OSError:
        raise InvalidValue("--plot", str(path), "a file that can be written") from None


def draw_load(counts: "npt.NDArray[Any]", measured: Balance, title: str, path: Path) -> None:
    """Draw the load per partition, and next to it a histogram of these loads."""
    from matplotlib.figure import Figure  # an optional extra, and slow to import

    mean = float(counts.mean())
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    load, histogram = figure.subplots(1, 2, sharey=True, width_ratios=(4, 1))
    load.bar(range(len(counts)), counts, width=1.0, color="#4c78a8")
    load.axhline(mean, color="#e45756", linewidth=1.2, label=f"mean {mean:,.0f}")
    low, high = float(counts.min()), float(counts.max())
    margin = max((high - low) * 0.15, mean * 0.0005, 1.0)
    load.set_ylim(max(low - margin, 0), high + margin)
    load.set_xlim(-0.5, len(counts) - 0.5)
    load.set(xlabel="partition", ylabel="ids")
    load.legend(loc="upper right")
    histogram.hist(counts, bins=40, orientation="horizontal", color="#4c78a8")
    histogram.axhline(mean, color="#e45756", linewidth=1.2)
    histogram.set(xlabel="partitions")
    figure.suptitle(
        f"{title}\nmax/mean {measured.max_over_mean:.4f}, chi²/df {measured.chi2_per_df:.3f}, "
        f"total deviation {measured.total_deviation:,.0f}, max {measured.max_deviation:,.0f}",
        fontsize=11,
    )
    figure.savefig(path, dpi=120)
