"""Student's t: the quantile that confidence intervals of few observations use (spec E-2)."""

import math

from fp8ref.shared.errors import require


def student(confidence: float, dof: int) -> float:
    """t with P(|T| <= t) = confidence, T of Student's distribution with dof degrees of freedom.

    Raises:   ValueError: confidence outside (0, 1), dof below 1.
    Source:   Abramowitz and Stegun, 26.7.3 and 26.7.4: closed forms in theta = atan(t / sqrt(dof)),
              increasing in theta.
    """
    if not 0 < confidence < 1:
        raise ValueError(f"confidence must be between 0 and 1; got {confidence}.")
    text = f"Student's distribution has at least 1 degree of freedom; got {dof}."
    require(dof >= 1, text)
    low, high = 0.0, math.pi / 2
    for _ in range(100):  # bisection: 2^-100 of the interval is below a double's spacing
        theta = (low + high) / 2
        low, high = (theta, high) if _inside(theta, dof) < confidence else (low, theta)
    return math.sqrt(dof) * math.tan(low)


def _inside(theta: float, dof: int) -> float:
    """P(|T| <= sqrt(dof) tan(theta))."""
    cos2, term, total = math.cos(theta) ** 2, 1.0, 0.0
    if dof % 2 == 0:
        for i in range(dof // 2):
            total += term
            term *= cos2 * (2 * i + 1) / (2 * i + 2)
        return math.sin(theta) * total
    term = math.cos(theta)
    for i in range(dof // 2):
        total += term
        term *= cos2 * (2 * i + 2) / (2 * i + 3)
    return (theta + math.sin(theta) * total) * 2 / math.pi
