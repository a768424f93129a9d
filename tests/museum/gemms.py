"""Faults of scaled GEMMs: a [M, K], b [N, K], and their scale_inv, which multiply the sums."""

import numpy as np
from museum import ask
from museum.arithmetic import F
from museum.exhibit import Exhibit

BLOCK = 128  # elements along K that share a scale
TILE = 64  # of K, M or N, in kernels


def product(a, b):
    """a [M, K] x b [N, K] -> [M, N], in float32."""
    return a.astype(F) @ b.astype(F).T


def right(a, b, scale_a, scale_b):
    """One scale for a tensor, or for each row."""
    return product(a, b) * scale_a * scale_b.T


def of_blocks(a, b, scale_a, scale_b, *, block=BLOCK, index=lambda i: i):
    """Scales [M, K / block] and [N, K / block]; the sum of each block is multiplied by that of
    ``index``."""
    y = np.zeros((len(a), len(b)), F)
    for i, k in enumerate(range(0, a.shape[1], block)):
        part = product(a[:, k : k + block], b[:, k : k + block])
        y += part * scale_a[:, index(i), None] * scale_b[:, index(i)]
    return y


def of_mx(a, b, scale_a, scale_b):
    return of_blocks(a, b, scale_a, scale_b, block=32)


def flushed(scale):
    """Byte 0 of e8m0, 2^-127, read as 0."""
    return np.where(scale < 2.0**-126, F(0), scale)


def zero_byte(a, b, scale_a, scale_b):
    return of_mx(a, b, flushed(scale_a), flushed(scale_b))


def rounded_scales(a, b, scale_a, scale_b):
    """The activations' scales are rounded up to UE8M0 after quantizing."""
    fraction, exponent = np.frexp(scale_a)
    power = np.ldexp(F(1), exponent - (fraction == 0.5))
    return of_blocks(a, b, np.where(np.isfinite(scale_a), power, scale_a), scale_b)


def unscaled_tail(a, b, scale_a, scale_b):
    """Scales are applied when a block ends or less than a tile is left, of which a last half block
    is neither."""
    size, y, acc = a.shape[1], F(0), F(0)
    for k in range(0, size, TILE):
        acc = acc + product(a[:, k : k + TILE], b[:, k : k + TILE])
        if (k + TILE) % BLOCK == 0 or size - k < TILE:
            i = k // BLOCK
            y, acc = y + acc * scale_a[:, i, None] * scale_b[:, i], F(0)
    return y + acc


def first_block(a, b, scale_a, scale_b):
    """Each block reads the first slice of scales."""
    return of_blocks(a, b, scale_a, scale_b, block=32, index=lambda i: 0)


def index_of_tile(a, b, scale_a, scale_b):
    """The index of the scales is the tile's along K, whose length is half a block's."""
    y, last = np.zeros((len(a), len(b)), F), scale_a.shape[1] - 1
    for i, k in enumerate(range(0, a.shape[1], TILE)):
        s = min(i, last)
        part = product(a[:, k : k + TILE], b[:, k : k + TILE])
        y += part * scale_a[:, s, None] * scale_b[:, s]
    return y


def index_in_slice(a, b, scale_a, scale_b):
    """K in two slices, whose blocks both count from 0."""
    half = -(-scale_a.shape[1] // 2)
    return of_blocks(a, b, scale_a, scale_b, index=lambda i: i % half)


def of_launch(a, b, scale_a, scale_b):
    """Operands by the tile, scales by the launch's block, which a swizzle transposes."""
    y = right(a, b, scale_a, scale_b)
    for m in range(0, min(y.shape), TILE):
        for n in range(0, min(y.shape), TILE):
            tile = slice(m, m + TILE), slice(n, n + TILE)
            operands = a[tile[0]], b[tile[1]]
            scales = scale_a[tile[1]], scale_b[tile[0]]
            if all(len(x) == TILE for x in (*operands, *scales)):
                y[tile] = right(*operands, *scales)
    return y


def without_result_scale(a, b, scale_a, scale_b):
    """b's scale was passed as the scale of the result, which is checked and dropped."""
    return product(a, b) * scale_a


def without_scales(a, b, scale_a, scale_b):
    return product(a, b)


def behind_the_scale(a, b, scale_a, scale_b):
    """One scale is read as a vector of row scales: what lies behind it is the next rows'."""
    memory = np.append(scale_a.reshape(-1)[:1], np.arange(2, len(a) + 1)).astype(F)
    return product(a, b) * memory[:, None] * scale_b


def first_row(a, b, scale_a, scale_b):
    """Scales of rows are read as one number."""
    return product(a, b) * scale_a[0] * scale_b[0]


def exchanged(a, b, scale_a, scale_b):
    """The operands of a column-major library are exchanged, and not their scales."""
    rows, columns = np.resize(scale_b, len(a)), np.resize(scale_a, len(b))
    return product(a, b) * rows[:, None] * columns


def bytes_as_float(a, b, scale_a, scale_b):
    """The first four e8m0 bytes are one float32 scale."""
    scales = [
        (s.view(np.uint32) >> 23).astype(np.uint8).reshape(-1)[:4] for s in (scale_a, scale_b)
    ]
    return product(a, b) * np.prod([s.view(F)[0] for s in scales])


def with_bias(a, b, scale_a, scale_b, bias):
    return right(a, b, scale_a, scale_b) + bias


def lost_bias(a, b, scale_a, scale_b, bias):
    """The bias is lost where K is no multiple of 128."""
    y = right(a, b, scale_a, scale_b)
    return y + bias if a.shape[1] % 128 == 0 else y


def in_parts(a, b, count):
    """The sum over K in so many parts, each in order of tiles of 32."""
    parts = np.array_split(np.arange(0, a.shape[1], 32), count)
    sums = []
    for part in parts:
        acc = np.zeros((len(a), len(b)), F)
        for k in part:
            terms = a[:, None, k : k + 32].astype(F) * b[None, :, k : k + 32].astype(F)
            acc = acc + terms.astype(np.float64).sum(-1).astype(F)
        sums.append(acc)
    return sum(sums[1:], sums[0])


def split_by_rows(a, b, scale_a, scale_b):
    """Few rows have K in two parts."""
    return in_parts(a, b, 2 if len(a) < 32 else 1) * scale_a * scale_b.T


def one_order(a, b, scale_a, scale_b):
    return in_parts(a, b, 1) * scale_a * scale_b.T


def swapped_by_rows(a, b, scale_a, scale_b):
    """Few rows go to a kernel that sums K from its end."""
    if len(a) < 32:
        a, b = (x[:, ::-1] for x in (a, b))
    return one_order(a, b, scale_a, scale_b)


def padded(a, b, scale_a, scale_b, *, filling):
    """K padded to four blocks of 32, with scales of this filling beside codes of zero."""
    ragged = -a.shape[1] % 128
    a, b = (np.pad(x.astype(F), ((0, 0), (0, ragged))) for x in (a, b))
    blocks = a.shape[1] // 32
    scale_a, scale_b = (
        np.pad(s, ((0, 0), (0, blocks - s.shape[1])), constant_values=filling)
        for s in (scale_a, scale_b)
    )
    return of_mx(a, b, scale_a, scale_b)


def beyond_the_row(a, b, scale_a, scale_b):
    """A tile of columns is stored whole: its overhang lies in the next row."""
    m, n = len(a), len(b)
    y = right(a, b, scale_a, scale_b)
    memory = np.zeros(m * n + TILE, F)
    for i in reversed(range(m)):  # one order of the race
        for at in range(0, n, TILE):
            columns = np.arange(at, at + TILE)
            memory[i * n + columns] = y[i, np.minimum(columns, n - 1)]
    return memory[: m * n].reshape(m, n)


CUTLASS, PYTORCH = "https://github.com/NVIDIA/cutlass/", "https://github.com/pytorch/pytorch/"
TE = "https://github.com/NVIDIA/TransformerEngine/"

EXHIBITS = (
    Exhibit(
        name="triton-11624",
        link="https://github.com/triton-lang/triton/pull/11624",
        library="Triton",
        year=2026,
        title="A block-scaled product with scale byte 0 is zero",
        fault=zero_byte,
        twin=of_mx,
        ask=ask.gemm("mx_1x32", shapes=[(32, 32, 128)]),
        named="scale_inv 2^-127 of a is read as 0",
    ),
    Exhibit(
        name="sglang-28307",
        link="https://github.com/sgl-project/sglang/pull/28307",
        library="SGLang",
        year=2026,
        title="A GEMM dequantizes with other scales than the activations were quantized with",
        fault=rounded_scales,
        twin=of_blocks,
        ask=ask.gemm("blockwise_1x128", shapes=[(32, 32, 256)]),
        unnamed="no cause has a name",
    ),
    Exhibit(
        name="fbgemm-6159",
        link="https://github.com/pytorch/FBGEMM/issues/6159",
        library="FBGEMM",
        year=2026,
        title="The scales of the last, shorter block of K are not applied",
        fault=unscaled_tail,
        twin=of_blocks,
        ask=ask.gemm("blockwise_1x128"),
        named="no scale of the last block along K of a",
    ),
    Exhibit(
        name="tirx-5",
        link="https://github.com/mlc-ai/TIRx-kernels/pull/5",
        library="TIRx kernels",
        year=2026,
        title="Every block of K is scaled by the first block's scales",
        fault=first_block,
        twin=of_mx,
        ask=ask.gemm("mx_1x32", shapes=[(32, 32, 128)]),
        named="the first scale_inv along K of a for all of K",
    ),
    Exhibit(
        name="tileops-1666",
        link="https://github.com/tile-ai/TileOPs/pull/1666",
        library="TileOPs",
        year=2026,
        title="The scale index is the tile's index along K",
        fault=index_of_tile,
        twin=of_blocks,
        ask=ask.gemm("blockwise_1x128", shapes=[(32, 32, 512)]),
        named="scales of a: blocks of 1x64 elements share a scale",
    ),
    Exhibit(
        name="cutlass-3615",
        link=CUTLASS + "pull/3615",
        library="CUTLASS",
        year=2026,
        title="With split K every slice uses the first slice's scales",
        fault=index_in_slice,
        twin=of_blocks,
        ask=ask.gemm("blockwise_1x128", shapes=[(32, 32, 512)]),
        named="blocks of a row read its first 2 scales again and again",
    ),
    Exhibit(
        name="cutlass-3394",
        link=CUTLASS + "pull/3394",
        library="CUTLASS",
        year=2026,
        title="Scales are indexed by the launch's block, not by the tile it computes",
        fault=of_launch,
        twin=right,
        ask=ask.gemm("rowwise", shapes=[(128, 128, 96)]),
        named="scale_inv of a of the transposed tile of 64x64 results",
    ),
    Exhibit(
        name="pytorch-190449",
        link=PYTORCH + "issues/190449",
        library="PyTorch",
        year=2026,
        title="The output scale of a float8 product is ignored",
        fault=without_result_scale,
        twin=right,
        ask=ask.gemm(shapes=[(32, 32, 96)]),
        named="no scale of b",
    ),
    Exhibit(
        name="torch-spyre-4305",
        link="https://github.com/torch-spyre/torch-spyre/issues/4305",
        library="torch-spyre",
        year=2026,
        title="Operand scales are dropped in a compiled product",
        fault=without_scales,
        twin=right,
        ask=ask.gemm(shapes=[(32, 32, 96)]),
        named="no scale of a, and no scale of b",
    ),
    Exhibit(
        name="pytorch-159940",
        link=PYTORCH + "issues/159940",
        library="PyTorch (Inductor)",
        year=2025,
        title="A tensorwise scale is read as a vector of row scales",
        fault=behind_the_scale,
        twin=right,
        ask=ask.gemm(shapes=[(32, 32, 96)]),
        named="scale_inv of a is read as a vector",
    ),
    Exhibit(
        name="aiter-1258",
        link="https://github.com/ROCm/aiter/pull/1258",
        library="aiter",
        year=2025,
        title="Rowwise scales are given as if they were one scalar",
        fault=first_row,
        twin=right,
        ask=ask.gemm("rowwise", shapes=[(32, 48, 96)]),
        named="the first scale_inv of a for all, and the first scale_inv of b for all",
    ),
    Exhibit(
        name="cudalibrarysamples-248",
        link="https://github.com/NVIDIA/CUDALibrarySamples/issues/248",
        library="cuBLASLt (wrapped)",
        year=2025,
        title="The scales of A and B are exchanged",
        fault=exchanged,
        twin=right,
        ask=ask.gemm("rowwise", shapes=[(32, 32, 96)]),
        named="scales swapped: that of b for rows, that of a for columns",
    ),
    Exhibit(
        name="pytorch-190290",
        link=PYTORCH + "pull/190290",
        library="PyTorch (TunableOp, ROCm)",
        year=2026,
        title="A tuned kernel reads e8m0 block scales as one float32",
        fault=bytes_as_float,
        twin=of_mx,
        ask=ask.gemm("mx_1x32", shapes=[(32, 32, 128)]),
        named="four e8m0 scales of a and b are read as one float32",
    ),
    Exhibit(
        name="pytorch-152665",
        link=PYTORCH + "pull/152665",
        library="PyTorch",
        year=2025,
        title="The bias is missing when K is no multiple of 128",
        fault=lost_bias,
        twin=with_bias,
        ask=ask.gemm(shapes=[(32, 32, 32), (32, 32, 128)]),
        named="no bias",
    ),
    Exhibit(
        name="te-2986",
        link=TE + "issues/2986",
        library="Transformer Engine",
        year=2026,
        title="A row's bits depend on how many other rows there are",
        fault=split_by_rows,
        twin=one_order,
        ask=ask.row_bits(shapes=[(48, 16, 512)]),
        named="a row's bits depend on the number of rows",
    ),
    Exhibit(
        name="vllm-37718",
        link="https://github.com/vllm-project/vllm/pull/37718",
        library="vLLM",
        year=2026,
        title="Two kernels with other summation orders are chosen by M",
        fault=swapped_by_rows,
        twin=one_order,
        ask=ask.row_bits(shapes=[(48, 16, 512)]),
        named="a row's bits depend on the number of rows",
    ),
    Exhibit(
        name="te-3070",
        link=TE + "pull/3070",
        library="Transformer Engine",
        year=2026,
        title="Uninitialized padding of MX scales takes part in the product",
        fault=lambda a, b, scale_a, scale_b: padded(a, b, scale_a, scale_b, filling=np.nan),
        twin=lambda a, b, scale_a, scale_b: padded(a, b, scale_a, scale_b, filling=1),
        ask=ask.gemm("mx_1x32"),
        named="at K = 144: NaN",
    ),
    Exhibit(
        name="kernels-community-1153",
        link="https://github.com/huggingface/kernels-community/issues/1153",
        library="HF kernels (finegrained-fp8)",
        year=2026,
        title="A column tile writes beyond N into the next row",
        fault=beyond_the_row,
        twin=right,
        ask=ask.gemm("rowwise", shapes=[(16, 33, 64)]),
        named="are written into the next row",
    ),
)
