"""Faults of dequantizers: which scale an element reads, and what is done with it."""

import numpy as np
from museum import ask
from museum.arithmetic import F, decoded, e8m0
from museum.decoders import e2m1, mx
from museum.exhibit import Exhibit

from fp8ref.sim.quantize import scale_layouts


def nvfp4(codes, scale_inv, tensor_scale_inv):
    """codes [M, K], scale_inv [M, K / 16] and one scale of the tensor, both of which multiply."""
    tensor = np.asarray(tensor_scale_inv, F).reshape(())
    scale = np.repeat(np.asarray(scale_inv).astype(F), 16, axis=-1)[:, : codes.shape[1]]
    return e2m1(np.asarray(codes)) * (scale * tensor)


def divided(codes, scale_inv, tensor_scale_inv):
    """The checkpoint holds the tensor's scale, and its inverse is wanted."""
    return nvfp4(codes, scale_inv, F(1) / np.asarray(tensor_scale_inv, F))


def swizzled_twice(codes, scale_inv, tensor_scale_inv):
    """Scales are in their places, and are looked for where a swizzle would put them."""
    scale_inv = np.asarray(scale_inv)
    places = scale_layouts.SCALE_LAYOUTS["swizzled_128x4"].places(scale_inv.shape)
    flat = scale_inv.reshape(-1)
    return nvfp4(codes, flat[np.minimum(places, flat.size - 1)], tensor_scale_inv)


def mx_scales(codes):
    """The shape of an MX tensor's scales."""
    return len(codes), -(-codes.shape[1] // 32)


def swizzled(codes, scale_inv):
    """MXFP4 with scales in tiles of 128 x 4, each as 32 x 4 x 4."""
    flat = np.asarray(scale_inv).reshape(-1)
    return mx(e8m0)(codes, scale_layouts.load(flat, "swizzled_128x4", mx_scales(codes)))


def tiles_by_row(codes, scale_inv):
    """Each tile of 128 x 4 is read row by row."""
    row, column = np.indices(mx_scales(codes))
    tile = row // 128 * -(-column.shape[1] // 4) + column // 4
    flat = np.asarray(scale_inv).reshape(-1)
    return mx(e8m0)(codes, flat[tile * 512 + row % 128 * 4 + column % 4])


def by_column(codes, scale_inv, stride):
    """Blocks of 128 along K; the scales of a column of blocks are next to each other."""
    row, column = np.indices((len(codes), -(-codes.shape[1] // 128)))
    scale = np.asarray(scale_inv).reshape(-1)[column * stride + row]
    return decoded(codes) * np.repeat(scale, 128, axis=1)[:, : codes.shape[1]]


def padded_columns(codes, scale_inv):
    """Columns of scales are padded to a multiple of 4."""
    return by_column(codes, scale_inv, -(-len(codes) // 4) * 4)


def unpadded_columns(codes, scale_inv):
    return by_column(codes, scale_inv, len(codes))


MODULAR = "https://github.com/modular/modular/issues/6600"

EXHIBITS = (
    Exhibit(
        name="modular-6600-divisor",
        link=MODULAR,
        library="MAX",
        year=2026,
        title="The tensor's scale of NVFP4 is stored as a divisor, and multiplied in",
        fault=divided,
        twin=nvfp4,
        ask=ask.decoder("e2m1fn", granularity="nvfp4_1x16"),
        named="it divides by the tensor's scale",
    ),
    Exhibit(
        name="modular-6600-swizzle",
        link=MODULAR,
        library="MAX",
        year=2026,
        title="Block scales are swizzled twice",
        fault=swizzled_twice,
        twin=nvfp4,
        ask=ask.decoder("e2m1fn", granularity="nvfp4_1x16"),
        named="scales are read as swizzled_128x4",
    ),
    Exhibit(
        name="facebookexperimental-triton-917",
        link="https://github.com/facebookexperimental/triton/pull/917",
        library="Triton (TLX)",
        year=2026,
        title="Tiles of swizzled scales are read row by row",
        fault=tiles_by_row,
        twin=swizzled,
        ask=ask.decoder("e2m1fn", granularity="mx_1x32", layout="swizzled_128x4"),
        unnamed="element [1, 0] of [250, 768], mx_1x32: got its scale is number 768, expected number 24",
    ),
    Exhibit(
        name="rocm-libraries-12232",
        link="https://github.com/ROCm/rocm-libraries/pull/12232",
        library="hipBLASLt",
        year=2026,
        title="Columns of scales are taken to be as long as M, and are padded",
        fault=unpadded_columns,
        twin=padded_columns,
        ask=ask.decoder("e4m3fn", granularity="blockwise_1x128", layout="mn_major"),
        named="scales are read as column_major",
    ),
)
