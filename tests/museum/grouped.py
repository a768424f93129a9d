"""Faults of grouped and batched GEMMs."""

import numpy as np
from museum import ask
from museum.arithmetic import E4M3, F
from museum.exhibit import Exhibit
from museum.gemms import of_mx, product, right


def groups(offs):
    """(group, its first row, the row behind its last)."""
    return zip(range(len(offs)), [0, *offs[:-1]], offs, strict=True)


def empty(rows, columns, value=np.nan):
    """Memory that holds something."""
    return np.full((rows, columns), value, F)


def by_offsets(a, b, scale_a, scale_b, offs):
    """a [M, K] and b [E, N, K], scales [M, 1] and [E, N, 1] -> [M, N]; other rows are zeros."""
    y = empty(len(a), b.shape[1], 0)
    for e, begin, end in groups(offs):
        y[begin:end] = right(a[begin:end], b[e], scale_a[begin:end], scale_b[e])
    return y


def aligned_rows(a, b, scale_a, scale_b, offs):
    """Rows behind a group's last multiple of 16 are lost."""
    y = empty(len(a), b.shape[1], 0)
    for e, begin, end in groups(offs):
        end = begin + (end - begin) // 16 * 16
        y[begin:end] = right(a[begin:end], b[e], scale_a[begin:end], scale_b[e])
    return y


def unwritten_rows(a, b, scale_a, scale_b, offs):
    """Rows of no group hold what memory held."""
    y = by_offsets(a, b, scale_a, scale_b, offs)
    y[offs[-1] :] = np.nan
    return y


def wrapped_rows(a, b, scale_a, scale_b, offs):
    """Rows behind a group's last tile wrap around for loading and for storing; their scales do
    not."""
    y = empty(len(a), b.shape[1], 0)
    for e, begin, end in groups(offs):
        for at in range(begin, end, 32):
            rows = np.arange(at, at + 32)
            stored = begin + (rows - begin) % (end - begin)
            scale = scale_a[np.minimum(rows, len(a) - 1)]
            y[stored] = right(a[stored], b[e], scale, scale_b[e])
    return y


def ends_as_sizes(a, b, scale_a, scale_b, offs):
    """Offsets are given where sizes are wanted."""
    y, begin = empty(len(a), b.shape[1], 0), 0
    for e, size in enumerate(offs):
        end = min(begin + int(size), len(a))
        y[begin:end] = right(a[begin:end], b[e], scale_a[begin:end], scale_b[e])
        begin = end
    return y


def scaled_by_group(a, b):
    """Lists of Quantized: each group by its own scales."""
    return [right(*decoded(x, y)) for x, y in zip(a, b, strict=True)]


def decoded(x, y):
    """The numbers and scale_inv of two operands."""
    codes = [q.codes.view(E4M3) for q in (x, y)]
    return *codes, np.atleast_1d(x.scale_inv), np.atleast_1d(y.scale_inv)


def largest_scale(a, b):
    """Gate and up have a scale of the tensor each, and are multiplied by the larger."""
    largest = max(np.max(y.scale_inv) for y in b)
    return [
        product(*decoded(x, y)[:2]) * np.atleast_1d(x.scale_inv) * largest
        for x, y in zip(a, b, strict=True)
    ]


def padded_over_batch(a, b):
    """Rows of scales are padded once behind the flattened batch, and read as padded in each
    batch."""
    each = len(a[0].codes)
    padded = -(-each // 64) * 64
    flat = np.concatenate([x.scale_inv for x in a])
    memory = np.full((padded * len(a), flat.shape[1]), np.nan, F)
    memory[: len(flat)] = flat
    results = []
    for g, (x, y) in enumerate(zip(a, b, strict=True)):
        left, right_, _, scale_b = decoded(x, y)
        results.append(of_mx(left, right_, memory[g * padded : g * padded + each], scale_b))
    return results


def mx_by_group(a, b):
    return [of_mx(*decoded(x, y)) for x, y in zip(a, b, strict=True)]


def first_scale(a, b):
    """Scales by row are accepted, and the first one is used."""
    first = a[0].scale_inv.reshape(-1)[0]
    return [product(*decoded(x, y)[:2]) * first * y.scale_inv.T for x, y in zip(a, b, strict=True)]


def spilled_tiles(a, b, scale_a, scale_b, offs):
    """Tiles of 64 rows are stored whole: the last one of a group overwrites the next group."""
    y = empty(len(a), b.shape[1], 0)
    for e, begin, end in reversed(list(groups(offs))):
        for at in range(begin, end, 64):
            rows = slice(at, at + 64)
            y[rows] = right(a[rows], b[e], scale_a[rows], scale_b[e])
    return y


def without_scales(a, b, scale_a, scale_b, offs):
    y = empty(len(a), b.shape[1], 0)
    for e, begin, end in groups(offs):
        y[begin:end] = product(a[begin:end], b[e])
    return y


def scale_of_first(a, b):
    """Gate and up have a scale each, and are both multiplied by the gate's."""
    first = b[0].scale_inv
    return [
        product(*decoded(x, y)[:2]) * np.atleast_1d(x.scale_inv) * np.atleast_1d(first)
        for x, y in zip(a, b, strict=True)
    ]


PRIMUS = "https://github.com/AMD-AGI/Primus-Turbo/"
FLASHINFER = "https://github.com/flashinfer-ai/flashinfer/"

EXHIBITS = (
    Exhibit(
        name="torchtitan-2262",
        link="https://github.com/pytorch/torchtitan/issues/2262",
        library="torchtitan, torchao",
        year=2026,
        title="Rows after a group's last multiple of the alignment are lost",
        fault=aligned_rows,
        twin=by_offsets,
        ask=ask.offsets(),
        named="drops its rows after a multiple of 16",
    ),
    Exhibit(
        name="primus-turbo-397",
        link=PRIMUS + "issues/397",
        library="Primus-Turbo",
        year=2026,
        title="Rows that belong to no group hold what memory held",
        fault=unwritten_rows,
        twin=by_offsets,
        ask=ask.offsets(),
        named="rows of no group are NaN, not zeros",
    ),
    Exhibit(
        name="primus-turbo-349",
        link=PRIMUS + "pull/349",
        library="Primus-Turbo",
        year=2026,
        title="The last tile's rows wrap around and overwrite the first",
        fault=wrapped_rows,
        twin=by_offsets,
        ask=ask.offsets(),
        named="rows behind its last tile of 16, which wrap",
    ),
    Exhibit(
        name="fbgemm-4314",
        link="https://github.com/pytorch/FBGEMM/issues/4314",
        library="FBGEMM",
        year=2025,
        title="Offsets are given where sizes are wanted",
        fault=ends_as_sizes,
        twin=by_offsets,
        ask=ask.offsets(),
        named="offs are read as sizes",
    ),
    Exhibit(
        name="tensorrt-llm-14199",
        link="https://github.com/NVIDIA/TensorRT-LLM/pull/14199",
        library="TensorRT-LLM",
        year=2026,
        title="Gate and up share the larger global scale, their block scales do not",
        fault=largest_scale,
        twin=scaled_by_group,
        ask=ask.grouped("tensorwise", sizes=[32, 32], k=128),
        named="scale_inv of b is the largest of all groups",
    ),
    Exhibit(
        name="flashinfer-3604",
        link=FLASHINFER + "issues/3604",
        library="FlashInfer",
        year=2026,
        title="Swizzled scales are padded over the flattened batch",
        fault=padded_over_batch,
        twin=mx_by_group,
        ask=ask.grouped("mx_1x32", sizes=[48, 48], k=128),
        named="scales of a are read 16 rows further on",
    ),
    Exhibit(
        name="flashinfer-4052",
        link=FLASHINFER + "issues/4052",
        library="FlashInfer",
        year=2026,
        title="Scales by row are accepted and the first one is used",
        fault=first_scale,
        twin=scaled_by_group,
        ask=ask.grouped("rowwise", sizes=[32, 32], k=128),
        named="the first scale_inv of a for all",
    ),
    Exhibit(
        name="deepgemm-268",
        link="https://github.com/deepseek-ai/DeepGEMM/issues/268",
        library="DeepGEMM",
        year=2025,
        title="A tile of 64 rows overwrites the next group's rows",
        fault=spilled_tiles,
        twin=by_offsets,
        ask=ask.offsets(),
        named="rows 0 to 4 are overwritten by the last tile of group 0",
    ),
    Exhibit(
        name="zml-793",
        link="https://github.com/zml/zml/pull/793",
        library="zml",
        year=2026,
        title="The scales of experts are not used",
        fault=without_scales,
        twin=by_offsets,
        ask=ask.offsets(),
        named="is not scaled by scale_inv of a or b",
    ),
    Exhibit(
        name="vllm-54974",
        link="https://github.com/vllm-project/vllm/issues/54974",
        library="vLLM",
        year=2026,
        title="Up is multiplied by the gate's scale",
        fault=scale_of_first,
        twin=scaled_by_group,
        ask=ask.grouped("tensorwise", sizes=[32, 32], k=128),
        named="scale_inv of b is that of another group",
    ),
)
