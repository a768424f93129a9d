"""Whether what is timed computes the function that it should: ||x - bf16's|| / ||bf16's|| of
outputs and gradients, and how large it may be.
"""

from collections.abc import Sequence

# e4m3 has 3 fraction bits and e5m2 2: roundings are of 2^-4 and 2^-3 at most, about a third of it
# in the root mean square, of two operands.
LINEAR = 0.2
# Many linears in a row, whose errors add; another function differs by about 1, as would zeros.
BLOCKS = 0.5


def check(relative: Sequence[float], at_most: float) -> list[float]:
    """The differences from bfloat16. Raises:   ValueError: beyond at_most, or not finite."""
    if not all(value <= at_most for value in relative):  # nor NaN
        raise ValueError(
            f"differs from bf16 by {list(relative)}, relative, which FP8 explains up to "
            f"{at_most}: not timed."
        )
    return list(relative)
