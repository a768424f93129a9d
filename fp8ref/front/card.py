"""Show a tensor as lines of text, or in a notebook as a card with a histogram of magnitudes against
the format's range. The SVG has no script and no stylesheet; it reads on light and dark pages."""

import abc
import html
import math

import numpy as np

from fp8ref.formats import Format

__all__ = ["Card", "histogram", "lowest"]

_POWERS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
_WIDTH, _TOP, _FLOOR, _HEIGHT = 520, 30, 130, 150


class Card(abc.ABC):
    """What shows a title and facts, and in a notebook a picture under them."""

    @abc.abstractmethod
    def _facts(self) -> tuple[str, dict[str, str]]:
        """The title, and texts by name."""

    @abc.abstractmethod
    def _picture(self) -> str:
        """HTML under the facts; "" for none."""

    def __repr__(self) -> str:
        title, facts = self._facts()
        width = max(map(len, facts))
        return "\n".join([title, *(f"  {name:{width}}  {fact}" for name, fact in facts.items())])

    def _repr_html_(self) -> str:
        title, facts = self._facts()
        cells = (map(html.escape, fact) for fact in facts.items())
        left = 'td style="text-align:left"'
        rows = "".join(f"<tr><{left}>{a}</td><{left}>{b}</td></tr>" for a, b in cells)
        return f"<div><b>{html.escape(title)}</b><table>{rows}</table>{self._picture()}</div>"


def lowest(fmt: Format) -> int:
    """The lowest exponent that a histogram shows: four below all that becomes a number."""
    return fmt.emin - fmt.mantissa_bits - 5


def histogram(counts: np.ndarray, fmt: Format, title: str) -> str:
    """An SVG of counts by exponent, which ``stats.exponents`` returns for ``lowest(fmt)``."""
    bar, first = _WIDTH / len(counts), lowest(fmt)
    ends = (fmt.emin - fmt.mantissa_bits - 1, fmt.emin, math.log2(fmt.max))
    zero, normal, top = ((exponent - first + 1) * bar for exponent in ends)

    def box(x: float, y: float, width: float, look: str) -> str:
        height = _FLOOR - y
        return f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" {look}/>'

    def text(x: float, y: float, anchor: str, words: str) -> str:
        return f'<text x="{x:.1f}" y="{y}" text-anchor="{anchor}">{html.escape(words)}</text>'

    parts = [
        box(0, _TOP, zero, 'fill="#D55E00" opacity=".25"'),
        box(zero, _TOP, normal - zero, 'fill="#E69F00" opacity=".25"'),
        box(top, _TOP, _WIDTH - top, 'fill="#CC79A7" opacity=".25"'),
        text(zero / 2, _TOP - 4, "middle", "becomes zero"),
        text((zero + normal) / 2, _TOP - 4, "middle", "subnormal"),
        text(_WIDTH, _TOP - 4, "end", "clipped"),
        text(0, 12, "start", title),
    ]
    heights = (_FLOOR - _TOP) * counts / max(counts.max(), 1)
    parts += [
        box(i * bar + 1, _FLOOR - height, bar - 2, 'fill="#3E8EC4"')
        for i, height in enumerate(heights)
    ]
    every = -(-len(counts) // 10)
    for i in range(every, len(counts) - 1, every):
        power = str(first + i).translate(_POWERS)
        parts.append(text((i + 1) * bar, _HEIGHT - 6, "middle", f"2{power}"))
    return (
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" fill="currentColor" '
        f'style="font:11px sans-serif;max-width:100%">{"".join(parts)}</svg>'
    )
