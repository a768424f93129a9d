"""identify_cast names library casts, and reports what is wrong with planted ones and the simplest
input that shows it.
"""

import dataclasses

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch
from helpers.quantize import planted_casts as planted

from fp8ref.conformance import exhaustive, identify_cast
from fp8ref.conformance.cast.behavior import KNOWN_CASTS, DoubleRounding
from fp8ref.conformance.cast.identify import check_all_inputs
from fp8ref.conformance.kit import subject as subjects
from fp8ref.conformance.kit.subject import ConformanceError
from fp8ref.formats import E4M3FN, E5M2, FLOAT16
from fp8ref.jax.quantize import cast as jax_cast
from fp8ref.sim.quantize import cast
from fp8ref.torch.quantize import cast as torch_cast

SPECIFIED = {
    "format": "e4m3fn",
    "rounding": "nearest_even",
    "saturates": True,
    "overflow": "max",
    "infinities": "max",
    "inf_code": 0x7E,
    "nan_code": 0x7F,
    "nan_code_of_negative": 0x7F,
    "subnormals": "kept",
    "negative_zero": "kept",
    "double_rounding": None,
    "policy": None,
}


def to_torch(fmt):
    return lambda x: x.to(getattr(torch, f"float8_{fmt.name}"))


def to_jax(fmt):
    return jax.jit(lambda x: x.astype(f"float8_{fmt.name}"))


def to_ml_dtypes(fmt):
    return lambda x: x.astype(getattr(ml_dtypes, f"float8_{fmt.name}"))


@pytest.mark.grid(2)
@pytest.mark.parametrize(
    ("function", "framework", "fmt", "names"),
    [
        (to_torch, "torch", E4M3FN, ["torch"]),
        (to_torch, "torch", E5M2, ["torch", "torch_2.11"]),
        (to_jax, "jax", E4M3FN, ["torch_2.11", "ml_dtypes", "jax"]),
        (to_jax, "jax", E5M2, ["ml_dtypes", "jax"]),
        (to_ml_dtypes, "numpy", E4M3FN, ["torch_2.11", "ml_dtypes", "jax"]),
        (to_ml_dtypes, "numpy", E5M2, ["ml_dtypes", "jax"]),
        (lambda fmt: lambda x: cast.encode(x, fmt), "numpy", E4M3FN, ["saturating"]),
        (
            lambda fmt: lambda x: cast.encode(x, fmt, saturate=False),
            "numpy",
            E5M2,
            ["non_saturating"],
        ),
        (lambda fmt: lambda x: torch_cast.encode(x, fmt), "torch", E4M3FN, ["saturating"]),
        (lambda fmt: jax.jit(lambda x: jax_cast.encode(x, fmt)), "jax", E5M2, ["saturating"]),
    ],
)
def test_the_libraries_by_name(function, framework, fmt, names):  # C-8
    found = identify_cast(function(fmt), fmt, name="theirs", framework=framework)
    assert found.ok
    assert found.found["behavior"] == names
    assert found.found["double_rounding"] is None


@pytest.mark.parametrize(("function", "framework"), [(to_torch, "torch"), (to_ml_dtypes, "numpy")])
def test_float64_is_rounded_twice_by_libraries(function, framework):  # C-1
    found = identify_cast(function(E4M3FN), E4M3FN, framework=framework)
    assert found.found["double_roundings"] == {
        "float32": None,
        "bfloat16": None,
        "float16": None,
        "float64": "float32",
    }


MUTANTS = [
    (
        planted.ties_away,
        {"rounding": "nearest_away"},
        "1.0625 (float32 0x3F880000): got 0x39 = 1.125, expected 0x38 = 1 (C-2)",
    ),
    (
        planted.truncation,
        {"rounding": "toward_zero"},
        "1.1875 (float32 0x3F980000): got 0x39 = 1.125, expected 0x3A = 1.25 (C-2)",
    ),
    (
        planted.no_saturation,
        {"saturates": False, "overflow": "nan", "infinities": "nan", "inf_code": 0x7F},
        "512 (float32 0x44000000): got 0x7F = nan, expected 0x7E = 448 (C-3)",
    ),
    (
        planted.nan_for_infinity,
        {"infinities": "nan", "inf_code": 0x7F},
        "inf (float32 0x7F800000): got 0x7F = nan, expected 0x7E = 448 (C-3)",
    ),
    (
        planted.twice_by_bfloat16,
        {"double_rounding": "bfloat16"},
        "1.06640625 (float32 0x3F888000): got 0x38 = 1, expected 0x39 = 1.125 (C-1)",
    ),
    (planted.twice_by_float16, {"double_rounding": "float16"}, "expected 0x39 = 1.125 (C-1)"),
    (
        planted.cut_to_bfloat16,
        {"double_rounding": "bfloat16 (toward_zero)"},
        "got 0x38 = 1, expected 0x39 = 1.125 (C-1)",
    ),
    (
        planted.flushes_subnormals,
        {"subnormals": "flushed"},
        "0.0078125 (float32 0x3C000000): got 0x00 = 0, expected 0x04 = 0.0078125 (F-1)",
    ),
    (planted.flushes_inputs, {"subnormals": "flushed_before"}, "(F-1)"),
    (
        planted.loses_negative_zero,
        {"negative_zero": "lost_at_zero"},
        "-0 (float32 0x80000000): got 0x00 = 0, expected 0x80 = -0 (C-6)",
    ),
    (planted.loses_negative_zeros, {"negative_zero": "lost"}, "(C-6)"),
    (
        planted.max_240,
        {"format": "e4m3", "inf_code": 0x77},
        "256 (float32 0x43800000): got 0x77 = 240, expected 0x78 = 256 (F-2)",
    ),
    (
        planted.fnuz,
        {
            "format": "e4m3fnuz",
            "inf_code": 0x7F,
            "nan_code": 0x80,
            "nan_code_of_negative": 0x80,
            "negative_zero": "lost",
        },
        "1 (float32 0x3F800000): got 0x40 = 1, expected 0x38 = 1 (F-2)",
    ),
    (planted.up, {"rounding": "up"}, "(C-2)"),
    (
        planted.nan_is_zero,
        {"nan_code": 0, "nan_code_of_negative": 0},
        "nan (float32 0x7FC00000): got 0x00 = 0, expected 0x7F = nan (C-5)",
    ),
]


@pytest.mark.grid(4)
@pytest.mark.parametrize(
    ("function", "differs", "said"), MUTANTS, ids=lambda v: getattr(v, "__name__", None)
)
def test_mutants_by_what_is_wrong_with_them(function, differs, said):  # C-1 to C-6, F-2
    found = identify_cast(function, E4M3FN, expect="saturating")
    assert {key: found.found[key] for key in SPECIFIED} == SPECIFIED | differs
    assert found.identified
    assert not found.ok
    assert said in found.message
    assert found.to_dict()["differences"][0]["bits"][0].startswith("0x")


def test_another_format_than_was_asked_is_not_ok():  # F-2
    found = identify_cast(to_torch(E5M2), E4M3FN, framework="torch")
    assert found.identified
    assert not found.ok
    assert "a cast to e5m2 (max 57344), not e4m3fn (max 448), equal to torch" in found.message
    assert identify_cast(to_torch(E5M2), E5M2, framework="torch").ok


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (planted.nan_is_max, "NaN becomes 448"),
        (planted.max_240, "a cast to e4m3 (max 240), not e4m3fn (max 448), equal to saturating"),
        (planted.doubles, "; read as e4m3fn, most of e4m3fn's numbers come back multiplied by 2"),
        (
            planted.quadruples,
            "; read as e4m3fn, most of e4m3fn's numbers come back multiplied by 4",
        ),
        (planted.infinity_is_unsigned_nan, "infinities nan"),
    ],
)
def test_what_is_wrong_has_a_name(function, said):
    assert said in identify_cast(function, E4M3FN).message


def test_a_lost_sign_of_a_value_that_underflows_is_one_of_zero():  # C-6
    found = identify_cast(planted.loses_negative_zeros, E4M3FN, expect="saturating")
    assert [w.clause for w in found.differences] == ["C-6"]


@pytest.mark.parametrize(
    ("size", "wrong"),
    [((1 << 20) + 13, slice(-5, None)), (1025, slice(1024, None)), (33 * 65, slice(2112, None))],
)
def test_a_tail_that_no_short_array_has(size, wrong):  # C-1
    def function(x):
        codes = planted.saturating(x)
        if codes.size == size:
            codes.reshape(-1)[wrong] ^= 1
        return codes

    found = identify_cast(function, E4M3FN, expect="saturating")
    assert not found.ok
    assert not found.identified
    assert "gives other codes in arrays of other shapes" in found.message
    at = np.unravel_index(range(size)[wrong.start], (33, 65) if size == 33 * 65 else (size,))
    assert f"x{[int(i) for i in at]} = " in found.message


def test_shapes_that_it_raises_for_are_said():
    def function(x):
        if x.ndim != 1 or not x.size:
            raise TypeError("a vector of numbers, please")
        return planted.saturating(x)

    found = identify_cast(function, E4M3FN, expect="saturating")
    assert found.ok
    assert next(f for f in found.findings if f.what == "shapes").evidence.endswith(
        "it raises for [], [0], [33, 65], [64, 64], [3, 5, 17]"
    )


def test_what_is_as_specified():
    found = identify_cast(planted.saturating, E4M3FN, expect="saturating")
    assert {key: found.found[key] for key in SPECIFIED} == SPECIFIED
    assert found.ok
    assert not found.differences


def test_a_name_is_held_to_but_for_codes_of_nan():  # C-5
    assert identify_cast(to_torch(E4M3FN), E4M3FN, expect="saturating", framework="torch").ok
    assert not identify_cast(to_jax(E4M3FN), E4M3FN, expect="saturating", framework="jax").ok
    assert identify_cast(to_jax(E4M3FN), E4M3FN, expect="non_saturating", framework="jax").ok


@pytest.mark.grid(3)
@pytest.mark.parametrize(
    ("function", "framework", "differs"),
    [
        (lambda x: cast.decode(cast.encode(x, E4M3FN), E4M3FN), "numpy", {}),
        (lambda x: x.clamp(-448, 448).to(torch.float8_e4m3fn).to(x.dtype), "torch", {}),
        (
            jax.jit(lambda x: jnp.clip(x, -448, 448).astype(jnp.float8_e4m3fn).astype(x.dtype)),
            "jax",
            {},
        ),
        (
            lambda x: cast.decode(planted.max_240(x), E4M3FN),
            "numpy",
            {"format": "e4m3", "inf_code": 0x77},
        ),
        (
            lambda x: cast.decode(planted.ties_away(x), E4M3FN),
            "numpy",
            {"rounding": "nearest_away"},
        ),
    ],
)
def test_a_black_box_that_gives_values(function, framework, differs):
    found = identify_cast(function, E4M3FN, framework=framework)
    untold = {"nan_code": None, "nan_code_of_negative": None}
    assert {key: found.found[key] for key in SPECIFIED} == SPECIFIED | untold | differs
    assert found.identified
    assert found.ok == (not differs)


def test_a_cast_of_bfloat16_alone():
    def function(x):
        assert x.dtype == torch.bfloat16
        return x.to(torch.float8_e4m3fn)

    found = identify_cast(function, E4M3FN)
    assert found.framework == "torch"
    assert found.found["behavior"] == ["torch"]
    assert list(found.found["double_roundings"]) == ["bfloat16"]


def test_what_is_no_known_cast_names_its_simplest_input():
    def function(x):
        return np.where(x == 3.5, np.uint8(0), planted.saturating(x))

    found = identify_cast(function, E4M3FN)
    assert not found.ok
    assert "3.5 (float32 0x40600000): got 0x00 = 0, expected 0x46 = 3.5" in str(found.unlike[0])
    assert not identify_cast(lambda x: np.zeros(x.shape, np.uint8), E4M3FN).ok


def test_the_rare_input_is_found_among_all(monkeypatch):
    """A wrong code for one input in 2^23, which no question asks for, and all inputs, here the
    first 2^23, do.
    """
    rare = np.float32(1.2345e-38)

    def function(x):
        return np.where(x == rare, np.uint8(1), planted.saturating(x))

    assert identify_cast(function, E4M3FN).ok
    monkeypatch.setattr(exhaustive, "INPUTS", 1 << 23)
    monkeypatch.setattr(exhaustive, "PIECE", 1 << 20)
    assert identify_cast(planted.saturating, E4M3FN, exhaustive=True).ok
    near_zero = np.uint32(77).view(np.float32)
    found = identify_cast(
        lambda x: np.where(x == near_zero, np.uint8(1), planted.saturating(x)),
        E4M3FN,
        expect="saturating",
        exhaustive=True,
    )
    assert not found.ok
    assert (
        "(float32 0x0000004D): got 0x01 = 0.001953125, expected 0x00 = 0 (by the behavior found)"
        in found.message
    )
    start = int(rare.view(np.uint32)) & ~0xFFFFF
    assert start > 0
    finding, unlike = check_all_inputs(
        subjects.Subject(name="mine", function=function),
        E4M3FN,
        KNOWN_CASTS["saturating"].behavior(E4M3FN),
        inputs=start + 0x100000,
    )
    assert [w.bits for w in unlike] == [(f"0x{int(rare.view(np.uint32)):08X}",)]
    assert finding.value == start + 0x100000 - 1


@pytest.mark.exhaustive
@pytest.mark.parametrize("function", [to_torch, to_ml_dtypes])
def test_all_inputs(function):
    assert identify_cast(
        function(E4M3FN),
        E4M3FN,
        exhaustive=True,
        framework="torch" if function is to_torch else "numpy",
    ).ok


def wanders(x, calls=[]):  # noqa: B006
    calls.append(None)
    return np.full(x.shape, len(calls) % 100 + 1, np.uint8)


def changes(x):
    x[0] = 0
    return planted.saturating(x)


def refuses_nan(x):
    if np.isnan(x).any():
        raise FloatingPointError("no NaN here")
    return planted.saturating(x)


class Unreadable:
    dtype, shape = np.dtype("float32"), (1,)

    def __array__(self, *_, **__):
        raise RuntimeError("CUDA error: an illegal memory access")


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (
            lambda x: 1 / 0,
            "mine raised ZeroDivisionError for x numpy float32 .16..*: division by zero. Call "
            "it on this input alone",
        ),
        (
            refuses_nan,
            r"mine raised FloatingPointError for x numpy float32 \[1\] = \[nan\] \(bits "
            r"0x7F.*no NaN here",
        ),
        (lambda x: x.cuda(), "mine raised .* CUDA"),
        (changes, "mine changed its input, x numpy float32"),
        (
            wanders,
            "mine does not repeat itself, and does not round stochastically: float32 .* on the "
            "second call",
        ),
        (
            lambda x: planted.saturating(x)[:3],
            r"mine gives shape \[3\] for x numpy float32 .*a cast keeps the shape",
        ),
        (
            lambda x: planted.saturating(x).astype(np.int32),
            "mine gives int32 .*codes are uint8 or float8.*View other codes as uint8",
        ),
        (
            lambda x: (planted.saturating(x), 1),
            "mine gives a tuple .*a cast gives one array.*--kind quantizer",
        ),
        (lambda x: None, "mine gives a NoneType"),
        (lambda x: Unreadable(), "its output cannot be read .RuntimeError: CUDA error"),
    ],
)
def test_what_is_no_cast(function, said):
    with pytest.raises(ConformanceError, match=said):
        identify_cast(function, E4M3FN, name="mine")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"expect": "tf32"}, "a cast's behavior is one of"),
        ({"framework": "mxnet"}, "framework is one of numpy, torch, jax; got 'mxnet'"),
        (
            {"framework": "jax", "device": "cuda"},
            "a device applies to torch's arrays; got 'cuda' with jax",
        ),
        ({"framework": "torch", "device": "meteor"}, "device 'meteor' is not available"),
    ],
)
def test_what_a_user_can_do_wrong(options, said):
    with pytest.raises(ValueError, match=said):
        identify_cast(planted.saturating, E4M3FN, **options)


def test_formats_that_no_tensor_is_cast_to():
    with pytest.raises(ValueError, match=r"a cast is to one of e4m3fn, e5m2, .*; got float16"):
        identify_cast(planted.saturating, FLOAT16)


def test_the_parts_of_a_result_are_frozen():
    found = identify_cast(planted.saturating, E4M3FN)
    with pytest.raises(dataclasses.FrozenInstanceError):
        found.identified = False
    assert str(DoubleRounding(dtype="bfloat16")) == "bfloat16"


def test_a_result_that_the_next_call_overwrites():
    kept = {}

    def function(x):
        codes = planted.saturating(x)
        kept.setdefault(x.shape, np.empty_like(codes))[...] = codes
        return kept[x.shape]

    with pytest.raises(
        ConformanceError,
        match=r"mine overwrites its earlier output for x numpy float32 .6.. when it is called "
        r"again",
    ):
        identify_cast(function, E4M3FN, name="mine")


def test_strides_that_are_forgotten():  # C-1
    def function(x):
        return planted.saturating(
            np.ndarray(
                x.shape, x.dtype, x.base if x.base is not None and x.base.size >= x.size else x
            )
        )

    found = identify_cast(function, E4M3FN, expect="saturating")
    assert not found.ok
    assert "of x [33, 65], transposed in memory" in found.message


def test_what_rounds_nothing():
    found = identify_cast(lambda x: x, E4M3FN)
    assert not found.ok
    assert "it rounds to none of them" in found.message


def test_a_nan_whose_code_is_by_its_payload():  # C-5
    def function(x):
        codes = cast.encode(x, E5M2, saturate=False)
        payload = (np.asarray(x, np.float32).view(np.uint32) >> 21).astype(np.uint8) & 1
        return np.where(np.isnan(x), 0x7E | payload, codes).astype(np.uint8)

    found = identify_cast(function, E5M2, expect="non_saturating")
    assert found.ok, found.message
    assert found.found["nan_code"] is None


def test_what_it_does_not_take_is_said():
    def function(x):
        if x.dtype != np.float32:
            raise TypeError("float32, please")
        return planted.saturating(x)

    assert (
        "it does not accept bfloat16 or float16"
        in identify_cast(function, E4M3FN, expect="saturating").message
    )
