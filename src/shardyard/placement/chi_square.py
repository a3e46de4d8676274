"""The chi-square distribution, without SciPy, which takes 140 MB for it."""

import math

_SMALL = 1e-300
_EPSILON = 1e-16
_STIRLING_FROM = 30.0


def chi_square_tail(chi2: float, df: int) -> float:
    """The probability that a chi-square distributed number with `df` degrees of freedom is `chi2` or more.

    That is the regularised upper incomplete gamma function Q(df/2, chi2/2): 1 minus a series below the mean, a
    continued fraction (in Lentz's way) above it.
    """
    a, x = df / 2, chi2 / 2
    if x <= 0:
        return 1.0
    if math.isinf(x):
        return 0.0
    density = _scaled_density(a, x)
    if density == 0.0:
        return 1.0 if x < a else 0.0
    return 1.0 - density * _series(a, x) if x < a + 1 else density * _fraction(a, x)


def _scaled_density(a: float, x: float) -> float:
    """x**a * exp(-x) / gamma(a). For a large `a` the logarithms of these are so large that their difference would lose
    digits, so it is computed from the distance of x and a, and Stirling's series."""
    if a < _STIRLING_FROM:
        return math.exp(a * math.log(x) - x - math.lgamma(a))
    distance = (x - a) / a
    correction = 1 / (12 * a) - 1 / (360 * a**3) + 1 / (1260 * a**5) - 1 / (1680 * a**7)
    return math.sqrt(a / (2 * math.pi)) * math.exp(-a * (distance - math.log1p(distance)) - correction)


def _series(a: float, x: float) -> float:
    term = total = 1 / a
    while term > total * _EPSILON:
        a += 1
        term *= x / a
        total += term
    return total


def _fraction(a: float, x: float) -> float:
    b = x + 1 - a
    c, d = 1 / _SMALL, 1 / b
    result, step, i = d, 0.0, 0
    while abs(step - 1) > _EPSILON:
        i += 1
        factor = i * (a - i)
        b += 2
        d = 1 / _nonzero(factor * d + b)
        c = _nonzero(b + factor / c)
        step = c * d
        result *= step
    return result


def _nonzero(value: float) -> float:
    return value if abs(value) > _SMALL else _SMALL
