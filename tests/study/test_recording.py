import numpy as np
import pytest

from fp8ref import study
from fp8ref.study import recording
from fp8ref.study.recording import Operand, Recording


@pytest.mark.parametrize(
    ("rows", "most", "expected"),
    [
        (100, 128, [(0, 100)]),
        (128, 128, [(0, 128)]),
        (1000, 128, [(0, 128)]),
        (1000, 256, [(0, 128), (896, 1000)]),
        (1024, 384, [(0, 128), (512, 640), (896, 1024)]),
        (300, 256, [(0, 128), (256, 300)]),
    ],
)
def test_whole_blocks_are_kept_evenly_spaced(rows, most, expected):
    """The shorter last block of a tensor, if it is kept, is the last: no block of scales moves."""
    assert recording.spans(rows, most) == expected


def test_a_file_gives_back_what_was_written(tmp_path):
    rng = np.random.default_rng(0)
    wide = rng.standard_normal((3, 4)).astype(np.float32)
    narrow = (wide.view(np.uint32) & 0xFFFF0000).view(np.float32)
    made = Recording(framework="torch", chosen=("a", "b"))
    for name, kept in (("a/input", wide), ("a/weight", narrow)):
        made.operands[name] = Operand(
            kept=kept, amax=np.abs(kept).max(), columns=np.abs(kept).max(axis=0), rows=7
        )
    made.write(tmp_path / "step.npz")
    read = recording.read(tmp_path / "step.npz")
    assert (read.framework, read.chosen, read.layers, read.uncalled) == (
        "torch",
        ("a", "b"),
        ["a"],
        ["b"],
    )
    for name, operand in made.operands.items():
        for key in ("kept", "amax", "columns"):
            np.testing.assert_array_equal(getattr(read.operands[name], key), getattr(operand, key))
        assert read.operands[name].rows == 7
    assert read.nbytes == 2 * 3 * 4 * 4
    with np.load(tmp_path / "step.npz") as arrays:
        assert (arrays["a/input"].dtype, arrays["a/weight"].dtype) == (np.float32, np.uint16)


def test_another_file_is_refused(tmp_path):
    np.savez(tmp_path / "other.npz", x=np.zeros(3))
    with pytest.raises(ValueError, match=r"other\.npz is not a recording of fp8ref\.study"):
        recording.read(tmp_path / "other.npz")


def test_one_array_is_refused(tmp_path):
    np.save(tmp_path / "one.npy", np.zeros(3))
    with pytest.raises(ValueError, match=r"one\.npy is not a recording"):
        recording.read(tmp_path / "one.npy")


def test_what_is_chosen_is_checked():
    assert recording.chosen(["a.x", "a.y", "b"], "a.*", 128) == ["a.x", "a.y"]
    with pytest.raises(
        ValueError, match=r"layers matches the name of a linear of the model; got 'c\*' for a, b"
    ):
        recording.chosen(["a", "b"], "c*", 128)
    with pytest.raises(ValueError, match="a model without linears"):
        recording.chosen([], "*", 128)
    for rows in (0, 100, -128):
        with pytest.raises(
            ValueError,
            match=f"rows is a multiple of 128, which no block of scales crosses; got {rows}",
        ):
            recording.chosen(["a"], "*", rows)


def test_what_is_no_recording_and_no_list_of_names():
    with pytest.raises(
        ValueError, match=r"a study judges what study\.record yields, or study\.read; got int"
    ):
        study.judge(5)
    for judge, what in (
        (study.judge, "recipes"),
        (study.judge_attention, "variants"),
        (study.judge_states, "layouts"),
    ):
        with pytest.raises(
            ValueError, match=rf"{what} are a list of names; got 'rowwise'\. Write \['rowwise'\]"
        ):
            judge(Recording(framework="torch", chosen=(), operands={}), "rowwise")
