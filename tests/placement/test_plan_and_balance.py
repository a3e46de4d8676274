import math
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from shardyard.model import InvalidValue, Move, Partition
from shardyard.placement import balance, plan
from shardyard.placement.chi_square import chi_square_tail

P = [Partition("t", i) for i in range(5)]


def test_a_plan_says_what_moves_and_what_stays() -> None:
    result = plan({P[0]: "a", P[1]: "a", P[2]: "b", P[3]: "b"}, {P[0]: "a", P[1]: "c", P[2]: "b", P[4]: "c"})
    assert result.moves == (Move(P[1], "a", "c"),)
    assert result.gained == {"c": (P[1], P[4])}
    assert result.lost == {"a": (P[1],), "b": (P[3],)}
    assert result.unchanged == (P[0], P[2])
    assert result.fraction == 1 / 5


def test_a_plan_between_empty_assignments_has_no_moves() -> None:
    assert plan({}, {}).fraction == 0.0


def test_balance_matches_figures_computed_by_hand() -> None:
    figures = balance([10, 20, 30, 40])
    assert figures.total_deviation == 15 + 5 + 5 + 15
    assert figures.max_deviation == 15
    assert figures.max_over_mean == 40 / 25
    assert figures.chi2_per_df == pytest.approx((225 + 25 + 25 + 225) / 25 / 3)
    assert figures.gini == pytest.approx(0.25)


@given(st.lists(st.integers(1, 1000), min_size=2, max_size=50))
def test_chi_square_and_p_value_agree_with_scipy(counts: list[int]) -> None:
    from scipy.stats import chisquare  # noqa: PLC0415 it loads for half a second in each process that imports this module

    figures, expected = balance(counts), chisquare(counts)
    assert figures.chi2_per_df * (len(counts) - 1) == pytest.approx(expected.statistic)
    assert figures.p_value == pytest.approx(expected.pvalue, rel=1e-9)


@given(df=st.integers(1, 100_000), deviations=st.floats(-8, 12))
@example(df=1, deviations=0.0)
@example(df=2, deviations=40.0)
def test_the_tail_of_chi_square_agrees_with_scipy(df: int, deviations: float) -> None:
    """At so many standard deviations from the mean. (Beyond 100 000 degrees of freedom SciPy's series ends early.)"""
    from scipy.special import chdtrc  # noqa: PLC0415 likewise

    value = max(df + deviations * math.sqrt(2 * df), 0.0)
    assert chi_square_tail(value, df) == pytest.approx(float(chdtrc(df, value)), rel=1e-9)


@pytest.mark.parametrize(
    ("value", "df", "expected"),
    [
        (3.841458820694124, 1, 0.05),
        (9.487729036781154, 4, 0.05),
        (0.0, 5, 1.0),
        (math.inf, 5, 0.0),
        (1e9, 999, 0.0),
        (2 * math.log(2), 2, 0.5),
        (10_000_000.0, 10_000_000, 0.49994052917889),
    ],
)
def test_the_tail_of_chi_square_has_its_known_values(value: float, df: int, expected: float) -> None:
    assert chi_square_tail(value, df) == pytest.approx(expected, rel=1e-9)


def test_gini_is_0_when_all_are_equal_and_near_1_when_one_has_everything() -> None:
    assert balance([7] * 10).gini == 0
    assert balance([0] * 99 + [5]).gini == pytest.approx(0.99)


def test_no_load_and_one_partition_count_as_even() -> None:
    for counts in ([0, 0, 0], [9]):
        figures = balance(counts)
        assert (figures.total_deviation, figures.max_over_mean, figures.p_value, figures.gini) == (0, 1, 1, 0)


@pytest.mark.parametrize("bad", [[], [-1, 2], [float("nan")], np.zeros((2, 2)), ["a"], [[1], [2, 3]]])
def test_invalid_counts_are_refused(bad: Any) -> None:
    with pytest.raises(InvalidValue, match="counts is"):
        balance(bad)
