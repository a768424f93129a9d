"""Faults of decoders of FP8 and FP4 codes, and of dequantizers."""

import numpy as np
from museum import ask
from museum.arithmetic import E4M3, E4M3FNUZ, E5M2, F, bf16, bits, decoded, e8m0, number
from museum.exhibit import Exhibit

TABLE = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], F)
"""The numbers of e2m1's first eight codes."""


def e2m1(codes, table=TABLE):
    """Numbers of codes, one a byte."""
    return np.where(codes & 8, -table[codes & 7], table[codes & 7])


def fields(codes, mantissa_bits):
    """The sign as a factor, the exponent's field and the fraction of codes."""
    c = np.asarray(codes, np.uint8).astype(np.int64)
    exponent = (c & 127) >> mantissa_bits
    return np.where(c >> 7, -1.0, 1.0), exponent, c % (1 << mantissa_bits) / (1 << mantissa_bits)


def e4m3_all_normal(codes):
    """The implicit one and the bias, whatever the exponent's field."""
    sign, exponent, fraction = fields(codes, 3)
    return (sign * (1 + fraction) * 2.0 ** (exponent - 7)).astype(F)


def e4m3(codes):
    return decoded(codes, E4M3)


def e2m1_all_normal(codes):
    """The same of four bits: 0 is 0.5 and 0.5 is 0.75."""
    exponent = codes >> 1 & 3
    return (np.where(codes & 8, -1, 1) * (1 + (codes & 1) / 2) * 2.0 ** (exponent - 1.0)).astype(F)


def e5m2_without_specials(codes):
    """One multiplication rebiases all codes: infinities and NaNs become numbers."""
    sign, exponent, fraction = fields(codes, 2)
    magnitude = np.where(
        exponent == 0, fraction * 2.0**-14, (1 + fraction) * 2.0 ** (exponent - 15)
    )
    return (sign * magnitude).astype(F)


def e5m2(codes):
    return decoded(codes, E5M2)


def fnuz_table_after_guard(codes):
    """The table of zero magnitudes and the sign overwrite the guard of 0x80."""
    magnitude = decoded(codes & 0x7F, E4M3FNUZ)
    guarded = np.where(codes == 0x80, F(np.nan), magnitude)
    zeroed = np.where(codes & 0x7F == 0, F(0), guarded)
    return np.copysign(zeroed, np.where(codes >> 7, F(-1), F(1)))


def e4m3fnuz(codes):
    return decoded(codes, E4M3FNUZ)


def e5m2_rebiased(codes):
    """The difference of the biases is added to an exponent field of 0 as well."""
    c = np.asarray(codes).astype(np.uint32)
    return number((c >> 7 << 31) | ((c & 0x7F) << 21) + np.uint32(112 << 23))


def e8m0_by_shift(codes):
    """The code becomes float32's exponent field: 0 and 255 are no powers of two there."""
    return number(np.asarray(codes).astype(np.uint32) << 23)


def mx(decode_scale):
    """A dequantizer of MXFP4: codes [M, K], scale bytes [M, K / 32]."""

    def dequantize(codes, scale_inv):
        scale = np.repeat(decode_scale(np.asarray(scale_inv)), 32, axis=-1)
        return bf16(e2m1(codes) * scale[:, : codes.shape[1]])

    return dequantize


def exponent_added(codes, scale_inv):
    """scale_inv's exponent is added to a bfloat16's, which borrows from the sign."""
    high = (bits(e2m1(codes)) >> 16).astype(np.int32)
    added = (np.repeat(np.asarray(scale_inv), 32, axis=-1).astype(np.int32) - 127) << 7
    added = added[:, : codes.shape[1]]
    return number((np.where(high & 0x7FFF, high + added, high) & 0xFFFF).astype(np.uint32) << 16)


def bytes_as_numbers(scale_inv):
    """The scale bytes are multiplied in as integers."""
    return scale_inv.view(np.uint8).astype(F)


def zero_alone_guarded(codes):
    """The normal formula, for all codes except 0."""
    return np.where(np.asarray(codes) & 127, e4m3_all_normal(codes), F(0))


def shift_count(codes):
    """1 << code, in 32 bits and without the bias."""
    return (np.int32(1) << (np.asarray(codes).astype(np.int32) & 31)).astype(F)


def wrong_table(codes):
    """0.0625 in the place of 0.5, from a table of relative numbers."""
    return e2m1(codes, np.array([0, 0.0625, 1, 1.5, 2, 3, 4, 6], F))


def pairs(packed):
    """Two numbers a byte, the first in the low half."""
    packed = np.asarray(packed)
    halves = np.stack([packed & 15, packed >> 4], -1)
    return e2m1(halves.reshape(*packed.shape[:-1], -1))


def second_is_empty(packed):
    """The halves, already a byte each, are unpacked once more: every second number is 0."""
    packed = np.asarray(packed)
    once = np.stack([packed & 15, packed >> 4], -1).reshape(*packed.shape[:-1], -1)
    twice = np.stack([once & 15, once >> 4], -1).reshape(*packed.shape[:-1], -1)
    return e2m1(twice[..., : once.shape[-1]])


def high_first(packed):
    packed = np.asarray(packed)
    return pairs(packed << 4 | packed >> 4)


def of_ggml(decode):
    """A decoder of GGML's blocks, given pairs: 32 elements have their first half in the low halves
    of 16 bytes, the second half in the high ones."""

    def decode_pairs(packed):
        packed = np.asarray(packed)
        elements = np.stack([packed & 15, packed >> 4], -1).reshape(-1, 2, 16)
        numbers = decode(elements[:, 0] | elements[:, 1] << 4)
        return numbers.reshape(*packed.shape[:-1], -1)

    return decode_pairs


def split_halves(block):
    """Bytes [blocks, 16]: low halves first, then high ones."""
    return e2m1(np.concatenate([block & 15, block >> 4], -1))


def widened(codes):
    """The scale's code as an integer."""
    return np.asarray(codes).view(np.uint8).astype(F)


def one_subnormal_exponent(codes):
    """Subnormal codes have the exponent of 2^-7 and an implicit one."""
    c = np.asarray(codes, np.uint8).astype(np.uint32)
    subnormal = number(np.uint32(120 << 23) | (c & 7) << 20 | c >> 7 << 31)
    return np.where((c & 0x78 == 0) & (c & 7 != 0), subnormal, decoded(codes, E4M3))


def of_columns(codes, scale_inv, *, column=None):
    """Codes [M, K] times scales of blocks of 128, which lie in columns of M; column: the stride
    from one column to the next."""
    m, count = codes.shape[0], -(-codes.shape[1] // 128)
    stride = m if column is None else column
    index = np.arange(m)[:, None] + stride * np.arange(count)
    scales = np.repeat(np.asarray(scale_inv).reshape(-1)[index], 128, axis=1)
    return decoded(codes) * scales[:, : codes.shape[1]]


def unit_column(codes, scale_inv):
    """The row's stride is passed, and the column's taken for 1."""
    return of_columns(codes, scale_inv, column=1)


TILELANG = "https://github.com/tile-ai/tilelang/"

EXHIBITS = (
    Exhibit(
        name="tilelang-2702",
        link=TILELANG + "issues/2702",
        library="TileLang",
        year=2026,
        title="e4m3 subnormals and zeros are decoded as normals, NaN as 480",
        fault=e4m3_all_normal,
        twin=e4m3,
        ask=ask.decoder("e4m3fn"),
        named="read as normal numbers and NaN of e4m3fn is taken for numbers",
    ),
    Exhibit(
        name="tilelang-2704",
        link=TILELANG + "issues/2704",
        library="TileLang",
        year=2026,
        title="The four e2m1 codes with exponent 0 are decoded as normals",
        fault=e2m1_all_normal,
        twin=e2m1,
        ask=ask.decoder("e2m1fn"),
        named="zero are read as normal numbers",
    ),
    Exhibit(
        name="intel-triton-7771",
        link="https://github.com/intel/intel-xpu-backend-for-triton/issues/7771",
        library="Triton (Intel XPU)",
        year=2026,
        title="NaN and infinity of FP8 become finite bfloat16 numbers",
        fault=e5m2_without_specials,
        twin=e5m2,
        ask=ask.decoder("e5m2"),
        named="NaN and infinities of e5m2 are taken for numbers",
    ),
    Exhibit(
        name="triton-10745",
        link="https://github.com/triton-lang/triton/issues/10745",
        library="Triton (AMD)",
        year=2026,
        title="The only NaN of the fnuz formats is decoded as -0",
        fault=fnuz_table_after_guard,
        twin=e4m3fnuz,
        ask=ask.decoder("e4m3fnuz"),
        named="code 0x80 of e4m3fnuz at [0, 128]: got -0, expected nan",
    ),
    Exhibit(
        name="tvm-20315",
        link="https://github.com/apache/tvm/issues/20315",
        library="TVM",
        year=2026,
        title="e5m2 zeros and subnormals are rebased as normals",
        fault=e5m2_rebiased,
        twin=e5m2,
        ask=ask.decoder("e5m2"),
        named="zero are read as normal numbers",
    ),
    Exhibit(
        name="te-3262",
        link="https://github.com/NVIDIA/TransformerEngine/pull/3262",
        library="Transformer Engine",
        year=2026,
        title="e8m0 codes 0 and 255 are expanded by a shift",
        fault=e8m0_by_shift,
        twin=e8m0,
        ask=ask.decoder("e8m0fnu"),
        named="NaN of e8m0fnu is taken for infinity and code 0 of e8m0fnu is taken for 0",
    ),
    Exhibit(
        name="vllm-46676",
        link="https://github.com/vllm-project/vllm/pull/46676",
        library="vLLM (ROCm)",
        year=2026,
        title="An e8m0 scale is added to the exponent bits without looking at the ends",
        fault=exponent_added,
        twin=mx(e8m0),
        ask=ask.decoder("e2m1fn", granularity="mx_1x32"),
        named="a scale_inv of 2^126 gives NaN",
    ),
    Exhibit(
        name="b12x-388",
        link="https://github.com/local-inference-lab/b12x/pull/388",
        library="b12x",
        year=2026,
        title="Small e4m3 block scales are decoded with the normal formula",
        fault=zero_alone_guarded,
        twin=e4m3,
        ask=ask.decoder("e4m3fn"),
        named="subnormal codes of e4m3fn are read as normal numbers",
    ),
    Exhibit(
        name="omlx-2159",
        link="https://github.com/jundot/omlx/pull/2159",
        library="oMLX",
        year=2026,
        title="e8m0 bytes stored as uint8 are multiplied in as numbers",
        fault=mx(bytes_as_numbers),
        twin=mx(e8m0),
        ask=ask.decoder("e2m1fn", granularity="mx_1x32"),
        named="codes of scales are read as integers",
    ),
    Exhibit(
        name="tilelang-2748",
        link=TILELANG + "issues/2748",
        library="TileLang",
        year=2026,
        title="A scale byte is used as a shift count without its bias",
        fault=shift_count,
        twin=e8m0,
        ask=ask.decoder("e8m0fnu"),
        named="read as a power of two without its bias",
    ),
    Exhibit(
        name="neural-compressor-1891",
        link="https://github.com/intel/neural-compressor/issues/1891",
        library="Neural Compressor",
        year=2024,
        title="The FP4 table has 0.0625 where e2m1 has 0.5",
        fault=wrong_table,
        twin=e2m1,
        ask=ask.decoder("e2m1fn"),
        named="0x01 as 0.0625, 0x09 as -0.0625",
    ),
    Exhibit(
        name="intel-llvm-22781",
        link="https://github.com/intel/llvm/pull/22781",
        library="SYCL",
        year=2026,
        title="The second number of a packed FP4 pair is always zero",
        fault=second_is_empty,
        twin=pairs,
        ask=ask.decoder("e2m1fn"),
        named="every second number is 0",
    ),
    Exhibit(
        name="imp-567",
        link="https://github.com/kekzl/imp/pull/567",
        library="imp (GGUF)",
        year=2026,
        title="GGML's split nibble order is read as pairs",
        fault=of_ggml(pairs),
        twin=of_ggml(split_halves),
        ask=ask.decoder("e2m1fn"),
        named="numbers of both halves of 32 alternate",
    ),
    Exhibit(
        name="sglang-23625",
        link="https://github.com/sgl-project/sglang/pull/23625",
        library="SGLang",
        year=2026,
        title="The two FP4 numbers of a byte are swapped",
        fault=high_first,
        twin=pairs,
        ask=ask.decoder("e2m1fn"),
        named="of a pair the high half comes first",
    ),
    Exhibit(
        name="arch-com-908",
        link="https://github.com/arch-hdl-lang/arch-com/pull/908",
        library="Arch HDL",
        year=2026,
        title="A scale's code is widened as an integer",
        fault=widened,
        twin=e8m0,
        ask=ask.decoder("e8m0fnu"),
        named="codes of e8m0fnu are read as integers",
    ),
    Exhibit(
        name="one-bit-monster-300",
        link="https://github.com/1bit-MONSTER/1bit-MONSTER/issues/300",
        library="1bit-MONSTER",
        year=2026,
        title="All e4m3 subnormals share one float32 exponent",
        fault=one_subnormal_exponent,
        twin=e4m3,
        ask=ask.decoder("e4m3fn"),
        named="subnormal codes of e4m3fn are read as normal numbers",
    ),
    Exhibit(
        name="vllm-53338",
        link="https://github.com/vllm-project/vllm/issues/53338",
        library="vLLM",
        year=2026,
        title="The column stride of the scales is ignored when rows are scattered to experts",
        fault=unit_column,
        twin=of_columns,
        ask=ask.decoder("e4m3fn", granularity="blockwise_1x128", layout="column_major"),
        named="an element reads another scale: columns from 128 on",
    ),
)
