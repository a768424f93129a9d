"""Show a tensor as lines of text, or as a card in a notebook: facts, and a histogram of magnitudes
against the format's range.

The SVG is drawn by hand, without a script or a stylesheet. Texts have the page's color, and bars
read on light and dark.
"""

import html
import math
from collections.abc import Mapping

import numpy as np

from fp8ref.formats import Format

__all__ = ["card", "histogram", "lines", "lowest"]

_POWERS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
_WIDTH, _HEIGHT, _TOP, _BOTTOM = 520, 150, 30, 20


def lines(title: str, facts: Mapping[str, str]) -> str:
    """The title, and a line for each fact."""
    width = max(map(len, facts))
    return "\n".join([title, *(f"  {name:{width}}  {fact}" for name, fact in facts.items())])


def card(title: str, facts: Mapping[str, str], picture: str) -> str:
    """The same as HTML, over a picture."""
    rows = "".join(
        f'<tr><td style="text-align:left;opacity:.7">{html.escape(name)}</td>'
        f'<td style="text-align:left">{html.escape(fact)}</td></tr>'
        for name, fact in facts.items()
    )
    return f"<div><b>{html.escape(title)}</b><table>{rows}</table>{picture}</div>"


def lowest(fmt: Format) -> int:
    """The lowest exponent that a histogram shows: four below all that becomes a number."""
    return fmt.emin - fmt.mantissa_bits - 5


def histogram(counts: np.ndarray, fmt: Format, title: str) -> str:
    """An SVG of counts by exponent, which ``stats.exponents`` returns for ``lowest(fmt)``."""
    bar, most = _WIDTH / len(counts), max(int(counts.max(initial=0)), 1)
    room, first = _HEIGHT - _TOP - _BOTTOM, lowest(fmt)

    def left(exponent: float) -> float:
        return (exponent - first + 1) * bar

    zero, top = fmt.emin - fmt.mantissa_bits - 1, math.log2(fmt.max)
    areas = [
        (0.0, left(zero), "#D55E00", "becomes zero"),
        (left(zero), left(fmt.emin), "#E69F00", "subnormal"),
        (left(top), float(_WIDTH), "#CC79A7", "clipped"),
    ]
    parts = [
        f'<rect x="{begin:.1f}" y="{_TOP}" width="{end - begin:.1f}" height="{room}" '
        f'fill="{color}" opacity=".25"/><text x="{(begin + end) / 2:.1f}" y="{_TOP - 4}" '
        f'text-anchor="{"end" if end == _WIDTH else "middle"}">{name}</text>'
        for begin, end, color, name in areas
    ]
    for i, count in enumerate(counts):
        height = room * int(count) / most
        parts.append(
            f'<rect x="{i * bar + 1:.1f}" y="{_TOP + room - height:.1f}" width="{bar - 2:.1f}" '
            f'height="{height:.1f}" fill="#3E8EC4"/>'
        )
    every = -(-len(counts) // 10)
    exponents = range(first + every, first + len(counts) - 1, every)
    parts += [
        f'<text x="{left(e):.1f}" y="{_HEIGHT - 6}" text-anchor="middle">2'
        f"{str(e).translate(_POWERS)}</text>"
        for e in exponents
    ]
    parts.append(f'<text x="0" y="12">{html.escape(title)}</text>')
    return (
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" role="img" fill="currentColor" '
        f'style="font:11px sans-serif;max-width:100%">{"".join(parts)}</svg>'
    )
