"""Scales of other rows, blocks, tiles and layouts are named as they are read (spec B-14)."""

import numpy as np
import pytest

from fp8ref.conformance.gemm import grade_gemm, grade_grouped
from fp8ref.conformance.gemm.adapters import wrap
from fp8ref.formats import E2M1FN, E4M3FN
from fp8ref.sim.quantize import cast, scale_layouts

ml_dtypes = pytest.importorskip("ml_dtypes")

E8M0 = ml_dtypes.float8_e8m0fnu


def of_blocks(a, b, scale_a, scale_b, *, size=32, read_a=lambda i: i, read_b=lambda i: i):
    """Blocks of K, each under the scales of the blocks that ``read_a`` and ``read_b`` say."""
    y = np.zeros((len(a), len(b)), np.float32)
    for i, k in enumerate(range(0, a.shape[1], size)):
        x, z = (one[:, k : k + size].astype(np.float32) for one in (a, b))
        y += x @ z.T * scale_a[:, read_a(i), None] * scale_b[:, read_b(i)]
    return y


def grade(function, granularity="mx_1x32", shape=(128, 128, 256), **options):
    scaled = wrap(function, framework="numpy", granularity=granularity, **options)
    return grade_gemm(scaled, shapes=[shape], formats=options.get("formats", (E4M3FN, E4M3FN)))


def names(function, *arguments, **options):
    return [cause.name for cause in grade(function, *arguments, **options).causes]


@pytest.mark.parametrize(
    ("reads", "words"),
    [
        ({"read_b": lambda i: i // 2}, "scales of b: blocks of 1x64 elements share a scale"),
        (
            {"read_a": lambda i: i % 4},
            "scales of a: blocks of a row read its first 4 scales again and again",
        ),
        (
            {"read_a": lambda i: i % 2, "read_b": lambda i: i % 2},
            "scales of a: blocks of a row read its first 2 scales again and again, and scales of "
            "b: blocks of a row read its first 2 scales again and again",
        ),
        ({"read_b": lambda i: -1 - i}, "scales of b: blocks of a row read its scales backwards"),
        (
            {"read_a": lambda i: 0, "read_b": lambda i: 0},
            "the first scale_inv along K of a for all of K, and the first scale_inv along K of b "
            "for all of K",
        ),
    ],
)
def test_blocks_of_other_scales_are_named(reads, words):  # B-14
    assert names(lambda a, b, x, y: of_blocks(a, b, x, y, **reads)) == [words]


def test_rows_of_other_scales_are_named():
    def tiles(a, b, scale_a, scale_b):
        """Scales by the launch's block, operands by the tile, which is another one."""
        y = a.astype(np.float32) @ b.astype(np.float32).T
        i, j = np.indices(y.shape)
        return y * scale_a[j // 32 * 32 + i % 32, 0] * scale_b[:, 0]

    said = names(tiles, "rowwise", (128, 128, 96))
    assert said == ["scale_inv of a of the transposed tile of 32x32 results"]

    def ahead(a, b, scale_a, scale_b):
        return of_blocks(a, b, np.concatenate([scale_a[8:], np.nan * scale_a[:8]]), scale_b)

    assert names(ahead) == ["scales of a are read 8 rows further on"]

    def mixed(a, b, scale_a, scale_b):
        return of_blocks(a, b, scale_a[np.arange(len(a)) ^ 5], scale_b)

    said = names(mixed)
    assert said == ["scales of a: row 0 reads scale 40 in the place of 0, counted in C order"]


def test_a_tensors_scale_that_is_a_vector_is_named():
    def vector(a, b, scale_a, scale_b):
        memory = np.append(scale_a.reshape(-1)[:1], np.arange(2, len(a) + 1)).astype(np.float32)
        return a.astype(np.float32) @ b.astype(np.float32).T * memory[:, None] * scale_b

    (said,) = names(vector, "tensorwise", (32, 32, 96))
    assert said.startswith("scale_inv of a is read as a vector: row 0 right")


def test_four_bytes_that_are_read_as_one_number_are_named():
    def bytes_of(scales):
        codes = cast.encode(scales, "e8m0fnu").reshape(-1)[:4]
        return codes.view(np.float32)[0]

    def of_b(a, b, scale_a, scale_b):
        return of_blocks(a, b, scale_a, np.full_like(scale_b, bytes_of(scale_b)))

    assert names(of_b) == ["four e8m0 scales of b are read as one float32"]


def swizzled(a, b, scale_a, scale_b, *, layout_a="swizzled_128x4", layout_b="swizzled_128x4"):
    """Memory of uint8 codes, from where a kernel expects them."""
    read = []
    for codes, memory, layout in ((a, scale_a, layout_a), (b, scale_b, layout_b)):
        shape = len(codes), codes.shape[1] // 32
        assert memory.dtype == np.uint8
        memory = np.resize(memory, scale_layouts.store(np.zeros(shape, np.uint8), layout).shape)
        read.append(scale_layouts.load(memory, layout, shape).view(E8M0).astype(np.float32))
    return of_blocks(a, b, *read)


def test_scales_in_another_layout_are_named():  # S-25
    right = grade(swizzled, scale_layout="swizzled_128x4")
    assert (right.verdict, right.about["scales"]) == ("right", "uint8")
    wrong = names(swizzled, scale_layout="row_major")
    words = "scales of {} are read as swizzled_128x4"
    assert wrong == [f"{words.format('a')}, and {words.format('b')}"]

    def of_b(a, b, x, y):
        return swizzled(a, b, x, y, layout_b="row_major")

    assert names(of_b, scale_layout="swizzled_128x4") == ["scales of b are read as row_major"]


def by_tiles(across, down=None):
    """A kernel whose tiles of 128x4 scales are counted so; without ``down`` one after another
    along a row."""

    def function(a, b, scale_a, scale_b):
        read = []
        for codes, memory in ((a, scale_a), (b, scale_b)):
            rows, columns = len(codes), codes.shape[1] // 32
            r, c = np.indices((rows, columns))
            tile = c // 4 * down(rows) + r // 128 if down else r // 128 * across(columns) + c // 4
            place = tile * 512 + r % 32 * 16 + r % 128 // 32 * 4 + c % 4
            read.append(np.asarray(memory).reshape(-1)[place % memory.size].view(E8M0))
        return of_blocks(a, b, *(x.astype(np.float32) for x in read))

    return function


@pytest.mark.parametrize(
    ("across", "down", "words"),
    [
        (lambda c: c // 4, None, "swizzled_128x4 of columns // 4 tiles of 4 columns"),
        (
            None,
            lambda r: r // 128,
            "swizzled_128x4 whose tiles follow each other down a column of rows // 128 tiles of "
            "128 rows",
        ),
        (lambda c: -(-c // 4), None, None),
    ],
)
def test_tiles_of_scales_are_counted_rounded_up(across, down, words):  # S-25, B-14
    name = f"scales of {{}} are read as {words}"
    expected = [f"{name.format('a')}, and {name.format('b')}"] if words else []
    layout = {"scale_layout": "swizzled_128x4"}
    assert names(by_tiles(across, down), "mx_1x32", (272, 272, 160), **layout) == expected


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize(
    ("source", "words"),
    [
        (-2, "the last block of a row reads the scale before it"),
        (0, "blocks of a row read its first 3 scales again and again"),
    ],
)
def test_a_last_block_is_the_operands_own(which, source, words):  # B-14
    def function(a, b, *scales):
        scales[which][:, -1] = scales[which][:, source]
        return of_blocks(a, b, *scales)

    def of_copies(a, b, scale_a, scale_b):
        return function(a, b, scale_a.copy(), scale_b.copy())

    assert names(of_copies, shape=(128, 128, 128)) == [f"scales of {'ab'[which]}: {words}"]


def test_columns_of_scales_may_be_padded():  # S-25
    def padded(a, b, scale_a, scale_b):
        read = []
        for codes, scale in ((a, scale_a), (b, scale_b)):
            k, padding = codes.shape[1], -scale.shape[1] % 4
            wide = np.pad(scale, ((0, 0), (0, padding)))
            read.append(codes.astype(np.float32) * wide[:, np.arange(k) * wide.shape[1] // k])
        return read[0] @ read[1].T

    words = "scales of {}: K is cut into blocks by the columns of scales up to a multiple of 4"
    expected = f"{words.format('a')}, and {words.format('b')}"
    assert names(padded, shape=(32, 160, 160)) == [expected]


def test_scales_are_passed_as_hardware_holds_them():  # S-25
    def native(a, b, scale_a, scale_b):
        assert scale_a.dtype == scale_b.dtype == E8M0
        return of_blocks(a, b, scale_a.astype(np.float32), scale_b.astype(np.float32))

    found = grade(native)
    assert (found.verdict, found.about["scales"]) == ("right", "native")

    def fp4(a, b, scale_a, scale_b):
        assert (a.dtype, scale_a.dtype) == (ml_dtypes.float4_e2m1fn, ml_dtypes.float8_e4m3fn)
        scales = (x.astype(np.float32) for x in (scale_a, scale_b))
        return of_blocks(a, b, *scales, size=16)

    found = grade(fp4, "nvfp4_1x16", (64, 64, 128), formats=(E2M1FN, E2M1FN))
    assert (found.verdict, found.about["scales"]) == ("right", "native")
    assert "scales" not in grade(of_blocks, shape=(32, 32, 64)).about
    with pytest.raises(ValueError, match="scale_layout is"):
        wrap(of_blocks, scale_layout="diagonal")


def test_both_operands_of_a_last_block_and_columns_that_are_stored_whole():
    def tail(a, b, scale_a, scale_b):
        ones = np.ones_like(scale_a[:, -1:]), np.ones_like(scale_b[:, -1:])
        scales = (np.append(x[:, :-1], y, 1) for x, y in zip((scale_a, scale_b), ones, strict=True))
        return of_blocks(a, b, *scales)

    words = "no scale of the last block along K of {}"
    assert names(tail) == [f"{words.format('a')}, and {words.format('b')}"]

    def whole(a, b, scale_a, scale_b):
        y = of_blocks(a, b, scale_a, scale_b)
        m, n = y.shape
        memory = np.zeros(m * n + 16, np.float32)
        for i in reversed(range(m)):
            memory[i * n : i * n + n] = y[i]
            memory[i * n + n : i * n + -(-n // 16) * 16] = 0
        return memory[: m * n].reshape(m, n)

    (said,) = names(whole, shape=(16, 40, 64))
    assert said == "columns beyond N, zeros up to a multiple of 16, are written into the next row"


def by_groups(choose):
    def function(a, b):
        inverses = [np.max(y.scale_inv) for y in b]
        return [
            cast.decode(x.codes, x.fmt)
            @ cast.decode(y.codes, y.fmt).T
            * x.scale_inv
            * np.float32(choose(inverses, g))
            for g, (x, y) in enumerate(zip(a, b, strict=True))
        ]

    return function


@pytest.mark.parametrize(
    ("choose", "words"),
    [
        (lambda scales, g: max(scales), "scale_inv of b is the largest of all groups"),
        (lambda scales, g: scales[g - 1], "scale_inv of b is that of another group"),
    ],
)
def test_the_scale_of_another_group_is_named(choose, words):
    grades = grade_grouped(by_groups(choose), sizes=[16, 16], n=16, k=64, granularity="tensorwise")
    assert [cause.name for cause in grades.grades[0].causes] == [words]
    right = by_groups(lambda scales, g: scales[g])
    assert grade_grouped(right, sizes=[16, 16], n=16, k=64, granularity="tensorwise").ok
