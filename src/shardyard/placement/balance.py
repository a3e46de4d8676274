"""Measure how evenly load is spread over partitions."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shardyard.model import InvalidValue
from shardyard.model.extras import require
from shardyard.placement.chi_square import chi_square_tail

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class Balance:
    """How evenly load is spread over partitions. No load at all counts as perfectly even."""

    total_deviation: float
    """The sum, over all partitions, of the absolute difference from the mean."""
    max_deviation: float
    """The largest absolute difference from the mean."""
    max_over_mean: float
    """The load of the fullest partition divided by the mean: 1 is ideal, 2 means that it carries twice its share."""
    chi2_per_df: float
    """Chi-square per degree of freedom: about 1 for a good hash, far above 1 for a bad one, far below 1 for one
    that merely counts through dense ids."""
    p_value: float
    """The probability that a perfect hash would spread the load this unevenly or worse."""
    gini: float
    """The Gini coefficient: 0 when all partitions are equal, near 1 when one partition has everything."""


def balance(counts: "Sequence[int] | npt.NDArray[Any]") -> Balance:
    """Measure how evenly `counts`, the records (or bytes) of each partition, are spread."""
    require("server", "balance", "numpy")
    import numpy as np  # noqa: PLC0415 most importers of the package need none

    try:
        load = np.asarray(counts, dtype=np.float64)
    except (TypeError, ValueError):
        raise InvalidValue("counts", counts, "one number per partition") from None
    if load.ndim != 1 or not load.size:
        raise InvalidValue("counts", counts, "a non-empty list of numbers, one per partition")
    if not np.isfinite(load).all() or (load < 0).any():
        raise InvalidValue("counts", counts, "numbers of at least 0")
    mean = float(load.mean())
    if mean == 0:
        return Balance(0.0, 0.0, 1.0, 0.0, 1.0, 0.0)
    deviation = np.abs(load - mean)
    chi2 = float((deviation**2).sum() / mean)
    df = load.size - 1
    ranks = 2 * np.arange(1, load.size + 1) - load.size - 1
    return Balance(
        total_deviation=float(deviation.sum()),
        max_deviation=float(deviation.max()),
        max_over_mean=float(load.max() / mean),
        chi2_per_df=chi2 / df if df else 0.0,
        p_value=chi_square_tail(chi2, df) if df else 1.0,
        gini=float((ranks * np.sort(load)).sum() / (load.size * load.sum())),
    )
