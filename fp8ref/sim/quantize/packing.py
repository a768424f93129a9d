"""Two codes of 4 bits in a byte, as libraries store e2m1fn (spec F-5)."""

import numpy as np

__all__ = ["pack"]


def pack(codes) -> np.ndarray:
    """Two codes of 4 bits a byte, the first in its low half (spec F-5).

    Shapes:   codes uint8 [..., 2n], at most 15; uint8 [..., n].
    Raises:   ValueError: other dtypes or codes, or an odd number of them along the last axis.

    >>> pack(np.uint8([1, 2, 15, 0])), unpack(np.uint8([33, 15]))
    (array([33, 15], dtype=uint8), array([ 1,  2, 15,  0], dtype=uint8))
    """
    codes = np.asarray(codes)
    if (
        codes.dtype != np.uint8
        or codes.ndim == 0
        or codes.shape[-1] % 2
        or (codes.size and codes.max() > 15)
    ):
        largest = ""
        if codes.dtype == np.uint8 and codes.size:
            largest = f", the largest {codes.max()}"
        raise ValueError(
            f"pack takes uint8 codes up to 15, an even number in the last axis; got {codes.dtype} "
            f"{codes.shape}{largest}."
        )
    return codes[..., ::2] | codes[..., 1::2] << np.uint8(4)


def unpack(packed) -> np.ndarray:
    """The 4-bit codes, one a byte, of ``pack``'s pairs: uint8 [..., n] -> uint8 [..., 2n].

    Raises:   ValueError: another dtype, or no axis.
    """
    packed = np.asarray(packed)
    if packed.dtype != np.uint8 or packed.ndim == 0:
        raise ValueError(f"unpack takes uint8 pairs [..., n]; got {packed.dtype} {packed.shape}.")
    return np.stack([packed & np.uint8(15), packed >> np.uint8(4)], axis=-1).reshape(
        *packed.shape[:-1], 2 * packed.shape[-1]
    )
