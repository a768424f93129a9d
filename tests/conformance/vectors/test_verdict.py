"""Each vector that gen writes is wanted once: what is missing, unasked or repeated is named by its
line.
"""

import re

import numpy as np
import pytest

from fp8ref.conformance.vectors.operations import generate, judge
from fp8ref.formats import E4M3FN
from fp8ref.sim.quantize import cast

SETTINGS = {"format": "e4m3fn", "count": 0}
UNSURE = (
    "the vectors have no header, so verify assumes fp8ref vectors gen cast --format e4m3fn "
    "--count 0"
)


@pytest.fixture(scope="module")
def lines() -> list[str]:
    """All of gen's, with the right answers behind."""
    first, second, *vectors = generate("cast", SETTINGS)
    values = np.array([int(v, 16) for v in vectors], np.uint32).view(np.float32)
    return [
        first,
        second,
        *(f"{v} {code:02X}" for v, code in zip(vectors, cast.encode(values, E4M3FN), strict=True)),
    ]


def judged(lines, *, header=True, **how):
    stream = [f"{line}\n".encode() for line in lines if header or not line.startswith("#")]
    return judge("cast", stream, settings={} if header else SETTINGS, rules={}, **how)


@pytest.mark.parametrize("header", [True, False])
def test_a_whole_set_is_ok_in_any_order(lines, header):
    verdict = judged([*lines[:2], *lines[:1:-1]], header=header)
    assert verdict.ok
    assert verdict.complete
    assert verdict.text().endswith("\n1,562 of 1,562 vectors judged; 1,562 of 1,562 answers agree")
    assert not re.search("missing|not asked|repeated|no header|--some", verdict.text())


DAMAGE = {
    "the last lines": (
        lambda lines: lines[:-9],
        "missing: 9 of the 1,562 vectors; in gen's output, line 1556 (",
        "1,553 of 1,562 vectors",
    ),
    "the last line": (
        lambda lines: lines[:-1],
        "missing: 1 of the 1,562 vectors; in gen's output, line 1564 (",
        "1,561 of 1,562 vectors",
    ),
    "a line amid": (
        lambda lines: lines[:3] + lines[4:],
        "missing: 1 of the 1,562 vectors; in gen's output, line 4 (80000000)\n",
        "1,561 of 1,562 vectors judged; 1,561 of 1,561 answers agree",
    ),
    "one unasked": (
        lambda lines: [*lines[:9], "40490FDB 45", *lines[9:]],
        "not asked: 1 of the vectors received, judged like the others; line 10\n",
        "1,562 of 1,562 vectors judged; 1,563 of 1,563 answers agree",
    ),
    "one twice": (
        lambda lines: [*lines[:9], lines[8], *lines[9:]],
        "repeated: 1 of the vectors received, judged like the others; line 10\n",
        "1,562 of 1,562 vectors judged; 1,563 of 1,563 answers agree",
    ),
    "one instead of another": (
        lambda lines: [*lines[:9], lines[8], *lines[10:]],
        "line 10 (",
        "1,561 of 1,562 vectors judged; 1,562 of 1,562 answers agree",
    ),
}


@pytest.mark.parametrize(("damage", "says", "last"), DAMAGE.values(), ids=DAMAGE)
def test_another_set_than_was_asked_fails(lines, damage, says, last):
    verdict = judged(damage(lines))
    assert not verdict.differ
    assert not verdict.ok
    assert says in verdict.text()
    assert (
        "verify expects each vector of gen once; --some judges the vectors received\n"
        in verdict.text()
    )
    assert last in verdict.text().splitlines()[-1]


@pytest.mark.parametrize("damage", [damage for damage, *_ in DAMAGE.values()], ids=DAMAGE)
def test_without_a_header_it_fails_too_and_says_what_is_not_known(lines, damage):
    verdict = judged(damage(lines), header=False)
    assert not verdict.ok
    assert UNSURE in verdict.text()
    assert UNSURE not in judged(damage(lines)).text()


@pytest.mark.parametrize("header", [True, False])
@pytest.mark.parametrize("damage", [damage for damage, *_ in DAMAGE.values()], ids=DAMAGE)
def test_some_are_enough_where_that_is_said(lines, damage, header):
    verdict = judged(damage(lines), header=header, some=True)
    assert verdict.ok
    assert not verdict.complete
    assert re.search("^(missing|not asked|repeated): ", verdict.text(), re.MULTILINE)
    assert "--some" not in verdict.text()
    wrong = judged([*lines[:20], "40490FDB 44"], header=header, some=True)
    assert not wrong.ok
    assert wrong.differ == {"in range": 1}


def test_what_is_kept_of_a_verdict(lines):
    found = judged([*lines[:5], lines[4], "40490FDB 44", *lines[7:]]).to_dict()
    assert [(m["line"], m["text"]) for m in found["missing"]] == [
        (n, lines[n - 1].split()[0]) for n in (6, 7)
    ]
    assert (found["repeated"], found["unasked"]) == ([6], [7])
    assert found["differ"] == {"in range": 1}
    assert sum(found["asked"].values()) == sum(found["answered"].values()) + 2 == 1562
    assert not found["ok"]


def test_long_inputs_are_named_by_their_line_alone():
    settings = {"format": "e4m3fn", "count": 12}
    lines = [line.encode() for line in generate("quantize", settings)]
    answer = f" {','.join(['00'] * 512)} 3F800000".encode()
    verdict = judge(
        "quantize", [lines[0], *(line + answer for line in lines[4:])], settings=settings, rules={}
    )
    assert "\nmissing: 2 of the 12 vectors; in gen's output, line 3, 4\n" in verdict.text()
    verdict = judge("quantize", [lines[0], lines[-1] + answer], settings=settings, rules={})
    assert "line 3, 4, 5, 6, 7, 8, 9, 10, ...\n" in verdict.text()
