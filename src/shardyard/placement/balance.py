"""How even a distribution is."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from shardyard.model import InvalidValue


@dataclass(frozen=True, slots=True)
class Balance:
    """Figures about load per partition. No load at all counts as perfectly even."""

    total_deviation: float
    """The sum of what each partition is above or below the mean: one of the two figures of the CecoChat check."""
    max_deviation: float
    """The most that any partition is above or below the mean: the other one."""
    max_over_mean: float
    """The fullest partition against the mean: how much sooner it is full than it need be."""
    chi2_per_df: float
    """Chi-square per degree of freedom: about 1 for a good hash, far above for a bad one, far below for counting."""
    p_value: float
    """How often a perfect hash would do this badly or worse."""
    gini: float
    """0 when all are equal, near 1 when one partition has everything."""


def balance(counts: Sequence[int] | npt.NDArray[Any]) -> Balance:
    """Measure records (or bytes) per partition."""
    from scipy.special import chdtrc  # noqa: PLC0415 a fifth of a second, which most commands need not spend

    try:
        load = np.asarray(counts, dtype=np.float64)
    except (TypeError, ValueError):
        raise InvalidValue("counts", counts, "a number for each partition") from None
    if load.ndim != 1 or not load.size:
        raise InvalidValue("counts", counts, "a number for each of at least one partition")
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
        p_value=float(chdtrc(df, chi2)) if df else 1.0,
        gini=float((ranks * np.sort(load)).sum() / (load.size * load.sum())),
    )
