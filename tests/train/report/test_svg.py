import re

import pytest
from matplotlib.figure import Figure

from fp8ref.train.report import svg


@pytest.fixture
def figure():
    made = Figure(figsize=(2, 1))
    ax = made.subplots()
    ax.plot([0, 1], [0, 1], color=svg.RUNS[0])
    ax.imshow([[0, 1]])
    ax.set_title("a <b> & c", color=svg.INK)
    return made


def luminance(color: str) -> float:
    """Relative luminance, as WCAG 2.2 defines it."""
    channels = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return sum(w * c for w, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize(
    ("name", "least"),
    [("ink", 7), ("muted", 4.5), ("seed", 3), *((f"run{i}", 3) for i in range(6))],
)
def test_colors_stand_out_from_the_paper(name, least, dark):
    """WCAG 2.2: text by 4.5 (AA) or 7 (AAA), lines by 3."""
    low, high = sorted(luminance(svg.COLORS[of][dark]) for of in (name, "paper"))
    assert (high + 0.05) / (low + 0.05) >= least


@pytest.mark.parametrize("side", [0, 1], ids=["light", "dark"])
def test_no_two_colors_are_one(side):
    assert len({pair[side] for pair in svg.COLORS.values()}) == len(svg.COLORS)


def test_a_figure_s_colors_become_variables(figure):
    found = svg.inline(figure, "name", "label")
    assert "stroke: var(--run0)" in found
    assert "fill: var(--ink)" in found
    assert not any(light in found for light, _ in svg.COLORS.values())


def test_a_figure_is_one_element_that_refers_to_itself_alone(figure):
    found = svg.inline(figure, "name", 'a "label" <here>')
    assert found.startswith("<svg viewBox=")
    assert found.rstrip().endswith("</svg>")
    assert 'aria-label="a &quot;label&quot; &lt;here&gt;"' in found
    assert "a &lt;b&gt; &amp; c" in found
    ids, used = (
        set(re.findall(pattern, found))
        for pattern in (r'\bid="([^"]+)"', r'(?:url\(|href=")#([^)"]+)')
    )
    assert ids == used != set()
    assert all(i.startswith("name-") for i in ids)
    assert "http" not in found


@pytest.mark.parametrize(
    "name", ['a"><img src=x onerror=alert(1)>', "a)", "A", "1", "", "a-b", "a\n"]
)
def test_an_id_is_a_word(figure, name):
    with pytest.raises(ValueError, match="Number figures"):
        svg.inline(figure, name, "label")


def test_a_png_is_on_white(figure, tmp_path):
    from matplotlib.image import imread

    (tmp_path / "figure.png").write_bytes(svg.png(figure))
    assert imread(tmp_path / "figure.png")[0, 0].tolist() == [1, 1, 1, 1]
