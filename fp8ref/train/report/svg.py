"""Export matplotlib figures as PNG, and as inline SVG with CSS colors for light and dark pages."""

import base64
import hashlib
import importlib.resources
import io
import re
import warnings

import jinja2
import markupsafe
import matplotlib
from matplotlib.figure import Figure

import fp8ref
from fp8ref.plots import readout
from fp8ref.shared import console, package_data

__all__ = [
    "LINE",
    "RUNS",
    "SEED",
    "STYLE",
    "inline",
    "png",
    "policy",
    "script",
    "style",
    "template",
]

COLORS: dict[str, tuple[str, str]] = package_data.tables(__file__, "colors")
"""{variable: (color on light pages and PNGs, on dark pages)}; runs' are like Okabe and Ito's."""

INK, MUTED, LINE, SEED, BAND = (
    COLORS[name][0] for name in ("ink", "muted", "line", "seed", "band")
)
RUNS = [light for name, (light, _) in COLORS.items() if name.startswith("run")]
"""The light colors of runs, in order."""

STYLE = {
    "svg.fonttype": "none",  # text stays text
    "text.color": INK,
    "axes.edgecolor": MUTED,
    "axes.labelcolor": INK,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "axes.facecolor": "none",
    "font.size": 10,
}
"""matplotlib's settings for every figure of a report."""


def variables(dark: bool) -> str:
    """CSS declarations of the colors, for dark or light pages."""
    return " ".join(f"--{name}: {pair[dark]};" for name, pair in COLORS.items())


def style() -> markupsafe.Markup:
    """The style sheet of a page: colors for light and dark screens, tables, figures."""
    light = f"{variables(dark=False)} --good: #00684c; --bad: #a83200;"
    dark = f"{variables(dark=True)} --good: #4fd1a5; --bad: #ff9468;"
    rest = _file("style.css")
    return markupsafe.Markup(
        f":root {{ color-scheme: light dark; {light} }}\n@media (prefers-color-scheme: dark) {{ "
        f":root {{ {dark} }} }}\n{rest}"
    )


def script() -> markupsafe.Markup:
    """The script of a page: values on hover, and zoom, of the figures that ``inline`` made.

    A page has it as <script>{{ script }}</script>, without a space: ``policy`` allows just that.
    """
    return markupsafe.Markup(f"\n{_file('page.js')}")


def policy() -> markupsafe.Markup:
    """The Content-Security-Policy of a page: only ``script`` runs; nothing is loaded or sent.

    Styles are allowed inline, as matplotlib writes them into attributes, which have no hash.
    """
    digest = base64.b64encode(hashlib.sha256(script().encode()).digest()).decode()
    return markupsafe.Markup(
        f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; img-src "
        "data:; base-uri 'none'; form-action 'none'"
    )


def template(package: str) -> jinja2.Template:
    """page.html of a package, with style sheet, script and policy. What it shows is text, never
    markup, and of one line each."""
    environment = jinja2.Environment(
        autoescape=True,
        finalize=_shown,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals.update(
        policy=policy(), style=style(), script=script(), version=fp8ref.__version__
    )
    return environment.from_string(_file("page.html", package))


def _shown(value: object) -> object:
    """A browser obeys directions of text as a terminal does."""
    is_text = isinstance(value, str) and not isinstance(value, markupsafe.Markup)
    return console.one_line(str(value)) if is_text else value


def inline(figure: Figure, name: str, label: str) -> markupsafe.Markup:
    """The figure as an <svg> element whose colors are CSS variables. label: for screen readers.

    Ids that are referred to get the prefix ``name``, so that several figures fit one page; others
    are removed. Axes and ticks have classes, and the element has ``readout.of``, for ``script``.

    name      a letter, then letters and digits: it is written unescaped into ids and references.
    Raises:   ValueError: another name.
    """
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name):
        raise ValueError(
            f"a figure's id is a lower-case letter, then letters, digits or _; got {name!r}. "
            "Number figures."
        )
    with matplotlib.rc_context(STYLE | {"svg.hashsalt": name}):
        written = io.StringIO()
        _save(figure, written, format="svg", transparent=True, metadata={"Date": None})
    text = re.sub(r"<metadata>.*?</metadata>\s*", "", written.getvalue(), flags=re.DOTALL)
    text = text[text.index("<svg") :]
    head, body = text.split(">", 1)
    view = re.search(r'viewBox="([^"]*)"', head)
    assert view is not None
    body = body.replace("xlink:href", "href")
    body = re.sub(r'\bid="(axes|xtick|ytick)_\d+"', r'class="\1"', body)
    used = set(re.findall(r'(?:url\(|href=")#([^)"]+)', body))
    body = re.sub(
        r'\s*\bid="([^"]+)"',
        lambda match: f' id="{name}-{match[1]}"' if match[1] in used else "",
        body,
    )
    body = re.sub(r'(url\(|href=")#', rf"\g<1>#{name}-", body)
    values = f'data-readout="{_attribute(readout.of(figure))}"'
    for variable, (light, _) in COLORS.items():
        body, values = (text.replace(light, f"var(--{variable})") for text in (body, values))
    element = f'<svg viewBox="{view[1]}" role="img" aria-label="{_attribute(label)}" {values}>'
    return markupsafe.Markup(element + body)


def png(figure: Figure) -> bytes:
    """The figure as a PNG on white."""
    written = io.BytesIO()
    with matplotlib.rc_context(STYLE):
        _save(figure, written, format="png", dpi=150, facecolor="white")
    return written.getvalue()


def _save(figure: Figure, target, **keys) -> None:
    with warnings.catch_warnings():
        # a run may be named in any script
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        figure.savefig(target, **keys)


def _file(name: str, package: str = "fp8ref.train.report") -> str:
    return importlib.resources.files(package).joinpath(name).read_text(encoding="utf-8")


def _attribute(text: str) -> str:
    text = console.one_line(text).replace("&", "&amp;").replace("<", "&lt;")
    return text.replace(">", "&gt;").replace('"', "&quot;")
