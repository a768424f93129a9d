"""Quantizers that are right in whole blocks, and wrong in a ragged last one."""

import numpy as np
import pytest
from helpers.quantize import planted_quantizers as planted

from fp8ref.conformance import identify_quantizer
from fp8ref.conformance.quantizer import ragged_blocks
from fp8ref.conformance.quantizer.outputs import ScaleLayout
from fp8ref.formats import E4M3FN
from fp8ref.sim.quantize import scaling
from fp8ref.spec.granularity import GRANULARITIES


def identified(function, expect="torchao"):
    return identify_quantizer(function, E4M3FN, name="mine", expect=expect)


def test_what_takes_them_and_is_right():  # S-6, S-16
    found = identified(planted.ragged_blocks)
    assert found.ok, found.message
    said = next(f for f in found.findings if f.what == "ragged blocks")
    assert said.text == "as with zeros behind"
    assert "[131, 255]" in said.evidence
    assert not any("ragged" in one for one in found.unasked)


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (planted.stale_ragged_scale, "each group 4 times as large as the one before"),
        (planted.reads_beyond, "each group 4 times as large as the one before"),
        (planted.leaves_the_tail, "got code 0x00 (0)"),
        (
            planted.no_scale_of_the_tail,
            "[1] [4, 1], expected 8 scales, one of each block, the last one too (S-6, S-16)",
        ),
    ],
)
def test_what_is_wrong_in_them_alone(function, said):  # S-6, S-16
    found = identified(function)
    assert not found.ok
    assert not found.identified
    assert said in found.message
    assert len(found.differences) + len(found.unlike) == 1  # one cause, once
    assert not next(f for f in found.findings if f.what == "ragged blocks").value
    assert next(f for f in found.findings if f.what == "shapes").value


def test_codes_alone_too():
    assert identified(lambda x: planted.ragged_blocks(x)[0]).ok
    assert not identified(lambda x: planted.reads_beyond(x)[0]).ok


def test_what_refuses_them_is_no_fault_and_is_said():  # S-6
    found = identified(lambda x: scaling.quantize(x, E4M3FN, granularity="blockwise_1x128"))
    assert found.ok
    shapes = "[1, 3], [3, 65], [4, 129], [4, 144], [131, 255], [5, 376], [2, 8256]"
    assert f"ragged last blocks: it does not take {shapes}" in found.unasked
    assert (
        f"not tested: more than 1,187,712 elements; ragged last blocks: it does not take {shapes}"
        in found.message
    )
    assert found.to_dict()["unasked"] == found.unasked


def test_what_returns_whole_blocks_is_no_fault_and_is_said():
    def whole(x):
        return planted.ragged_blocks(np.pad(x, ((0, 0), (0, -x.shape[1] % 128))))

    found = identified(whole)
    assert found.ok
    assert any("ragged last blocks" in one for one in found.unasked)


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("axis", [-1, 0])
def test_zeros_behind_change_no_scale(granularity, axis):  # S-6
    """Where blocks are free of K there is nothing to pad; elsewhere groups are those of the padded
    tensor.
    """
    layout = ScaleLayout(granularity=granularity, axis=axis)
    shapes = ragged_blocks.shapes(layout)
    assert bool(shapes) == (GRANULARITIES[granularity].reduced is not None)
    for shape in shapes:
        x = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
        group = ragged_blocks.groups(shape, layout)
        amax = np.zeros(int(group.max()) + 1, np.float32)
        np.maximum.at(amax, group, np.abs(x))
        whole = scaling.amax(ragged_blocks.padded(x, layout), granularity, axis=axis)
        np.testing.assert_array_equal(amax, np.reshape(whole, -1))
