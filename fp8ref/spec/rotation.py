"""Rotations of blocks by a Hadamard matrix with signs, as data (spec S-23)."""

from dataclasses import dataclass

import numpy as np

__all__ = ["NVFP4_ROTATION", "ROTATIONS", "Rotation"]


@dataclass(frozen=True, kw_only=True)
class Rotation:
    """A Hadamard rotation of ``len(signs)`` consecutive elements along the reduced axis (A-13).

    signs  1 or -1 for each element: it is multiplied by it first.

    Raises:  ValueError: a size that is no power of two of at least 2, or other signs.
    """

    signs: tuple[int, ...]

    def __post_init__(self) -> None:
        size = len(self.signs)
        if size < 2 or size & (size - 1) or not set(self.signs) <= {1, -1}:
            raise ValueError(f"a rotation has 2, 4, 8, ... signs, each 1 or -1; got {self.signs}.")

    @property
    def size(self) -> int:
        """The elements that are rotated together."""
        return len(self.signs)


def check_size(size: int) -> None:
    """ValueError unless so many features can be rotated: a power of two."""
    if not isinstance(size, int | np.integer) or size < 1 or size & (size - 1):
        raise ValueError(
            f"the size of a Hadamard rotation is a power of two; got {size!r}. Pad with zeros."
        )


# TransformerEngine d0067d0d, pytorch/custom_recipes/reference_nvfp4.py: get_wgrad_sign_vector.
NVFP4_ROTATION = Rotation(signs=(1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1))
"""Transformer Engine's rotation of the operands of grad_weight under NVFP4, and torchao's."""

ROTATIONS = {"none": None, "nvfp4": NVFP4_ROTATION}
"""The rotations that a rule names (R-8)."""
