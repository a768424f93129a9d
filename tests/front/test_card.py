"""What a notebook shows of a tensor."""

import dataclasses
import re
import xml.etree.ElementTree as ET

import numpy as np

import fp8ref as f8
from fp8ref.formats import E4M3FN, E5M2
from fp8ref.front import card
from fp8ref.policy import POLICIES


def bars(html: str) -> list[float]:
    """The heights of the bars of a card's picture."""
    svg = ET.fromstring(re.search(r"<svg.*</svg>", html)[0])
    return [float(rect.get("height")) for rect in svg.iter("rect") if rect.get("fill") == "#3E8EC4"]


def test_names_are_escaped():
    policy = dataclasses.replace(POLICIES["torchao"], name="<script>alert(1)</script>")
    html = f8.quantize(np.ones((2, 32), np.float32), policy=policy)._repr_html_()
    assert "<script" not in html
    assert "&lt;script&gt;" in html


def test_bars_are_elements_by_exponent():
    """448, 1 and 2^-9, whose codes are normal, normal and subnormal, and 2^-11, which becomes zero."""
    x = np.float32([448, 448, 1, 2**-9, 2**-11, 2**-11, 2**-11, 2**-11])
    q = f8.quantize(x)
    first = card.lowest(E4M3FN)  # its bar is the second: the first holds all below
    exponents = {8: 2, 0: 1, -9: 1}
    after = [100 * exponents.get(first + i - 1, 0) / 2 for i in range(8 - first + 3)]
    assert bars(q._repr_html_()) == after
    before = bars(q.error(x)._repr_html_())
    assert before[-11 - first + 1] == 100
    assert [round(height) for height in before if height] == [100, 25, 25, 50]


def test_areas_begin_where_the_format_loses_numbers():
    svg = ET.fromstring(card.histogram(np.ones(45, np.int64), E5M2, "a < b"))
    areas = [rect for rect in svg.iter("rect") if rect.get("opacity")]
    bar = 520 / 45
    first = card.lowest(E5M2)
    ends = [-17, E5M2.emin]  # half the smallest number, and the smallest normal one
    for area, exponent in zip(areas, ends, strict=False):
        right = float(area.get("x")) + float(area.get("width"))
        assert abs(right - (exponent - first + 1) * bar) < 0.2
    assert [text.text for text in svg.iter("text")][:3] == ["becomes zero", "subnormal", "clipped"]
    assert "a < b" in [text.text for text in svg.iter("text")]
