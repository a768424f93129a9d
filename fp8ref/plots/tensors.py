"""Plot what quantizing did to each element of a tensor x (spec Q); q is its quantized form."""

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import BoundaryNorm, ListedColormap, LogNorm
from matplotlib.patches import Patch

from fp8ref.plots import style
from fp8ref.sim.quantize import cast, stats
from fp8ref.sim.quantize.scaling import Quantized, dequantize, spread

FATES = {
    "normal": "#E4EEF5",
    "subnormal": style.SKY,
    "became zero": style.VERMILLION,
    "clipped": style.PURPLE,
    "not finite": style.BLACK,
    "was zero": "#FFFFFF",
}
"""{fate of an element: its color in a map}."""


def magnitude_map(ax: Axes, x, *, powers: int = 12) -> Axes:
    """The exponent of each element of a matrix, one color per power of two, the ``powers`` largest.

    Zeros, infinities and NaNs stay white.

    Shapes:   x [M, K]; without a finite non-zero number the map is white, and its colors end at 1.
    Raises:   ValueError: x that is not a matrix, or that NumPy cannot read.
    """
    x = np.abs(_matrix(x).astype(np.float64))
    shown = np.isfinite(x) & (x > 0)
    exponent = np.where(shown, np.frexp(x)[1] - 1.0, np.nan)
    top = int(exponent[shown].max()) + 1 if shown.any() else 1
    norm = BoundaryNorm(np.arange(top - powers, top + 1), 256)
    image = style.cells(ax, np.clip(exponent, top - powers, None), "viridis", norm=norm)
    bar = ax.figure.colorbar(image, ax=ax, fraction=0.046)
    style.label_powers(bar, top - powers, top, ticks=7)
    bar.set_label(f"magnitude; below ${{2^{{{top - powers + 1}}}}}$ one color", fontsize=8)
    return style.plain_map(ax)


def error_map(
    ax: Axes, x, q: Quantized, *, cell: int | None = None, low: float = 1.0, high: float = 100.0
) -> Axes:
    """The relative error of each cell of a matrix: its elements' root mean square, in percent.

    cell  rows and columns of a cell; None: as many as give at most 64 cells each way. Zeros do not
          count; cells of zeros stay white.

    Shapes:   x [M, K] and q's codes alike.
    Raises:   ValueError: as ``sim.scaling.dequantize``; x that is not a matrix.
    """
    x = _matrix(x).astype(np.float64)
    error = dequantize(q).astype(np.float64) - x
    relative = np.divide(error, x, out=np.zeros_like(x), where=x != 0)
    size = cell or -(-max(x.shape) // 64)
    rows, columns = (np.arange(0, n, size) for n in x.shape)
    total, count = (
        np.add.reduceat(np.add.reduceat(v, rows, axis=0), columns, axis=1)
        for v in (relative**2, (x != 0).astype(np.float64))
    )
    empty = np.full(total.shape, np.nan)
    share = 100 * np.sqrt(np.divide(total, count, out=empty, where=count > 0))
    norm, extent = LogNorm(low, high, clip=True), (0, x.shape[1], x.shape[0], 0)
    image = style.cells(ax, share, "magma_r", norm=norm, extent=extent)
    bar = ax.figure.colorbar(image, ax=ax, fraction=0.046)
    bar.set_label(f"error, % (cells of {size} x {size})", fontsize=8)
    values = (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100)
    ticks = [tick for tick in values if low <= tick <= high]
    bar.set_ticks(ticks, labels=[f"{tick:g}" for tick in ticks])
    bar.minorticks_off()
    bar.ax.tick_params(labelsize=8)
    return style.plain_map(ax)


def fate_map(ax: Axes, x, q: Quantized, *, legend: bool = True) -> Axes:
    """What happened to every element of a matrix x [M, K], by color: see ``FATES``.

    Raises:   ValueError: x that is not a matrix, or that NumPy cannot read.
    """
    fate = fates(_matrix(x), q)
    style.cells(ax, fate, ListedColormap(list(FATES.values())), -0.5, len(FATES) - 0.5)
    if legend:
        present = [
            Patch(facecolor=c, edgecolor=style.MUTED, label=name)
            for i, (name, c) in enumerate(FATES.items())
            if (fate == i).any()
        ]
        style.legend(ax, handles=present, loc="center left", bbox_to_anchor=(1.02, 0.5))
    return style.plain_map(ax)


def fates(x, q: Quantized) -> np.ndarray:
    """int, of x's shape: for every element the index in ``FATES`` of what happened to it.

    Clipped: a cast without saturation would overflow (C-4).
    """
    x = np.asarray(x, np.float32)
    decoded = np.abs(cast.decode(q.codes, q.fmt))
    with np.errstate(invalid="ignore", over="ignore"):  # NaN, and products beyond float32
        scaled = x * spread(q.scale, x.shape, q.blocks)
    clipped = np.isfinite(decoded) & ~np.isfinite(cast.round_to(scaled, q.fmt))
    subnormal = decoded < q.fmt.smallest_normal
    cases = [x == 0, ~np.isfinite(decoded), decoded == 0, clipped, subnormal]
    names = ["was zero", "not finite", "became zero", "clipped", "subnormal"]
    numbers = {name: i for i, name in enumerate(FATES)}
    return np.select(cases, [numbers[name] for name in names], numbers["normal"])


def exponent_histogram(
    ax: Axes, x, q: Quantized, *, lowest: int | None = None, highest: int | None = None
) -> Axes:
    """How many elements, in percent, have each exponent after scaling, and, as an outline, after
    the cast; shaded: where codes are subnormal, zero, or beyond max. The title says how many of the
    elements other than zero become zero, and how many are clipped.

    lowest, highest  exponents shown; the first and the last bar hold all below and above. None:
                     four below the range to two above.
    Raises:          ValueError: as ``sim.stats.exponents``: another shape than q's, or float64.
    """
    fmt = q.fmt
    # half the smallest number: from there down all becomes zero
    top, bottom = int(np.floor(np.log2(fmt.max))), fmt.emin - fmt.mantissa_bits - 1
    lowest = bottom - 4 if lowest is None else lowest
    highest = top + 2 if highest is None else highest
    counts = stats.exponents(x, q, lowest=lowest, highest=highest)
    places = np.arange(lowest - 1, highest + 2)
    # exponent e is from 2^e to 2^(e + 1)
    before, after = (100 * n / max(np.asarray(x).size, 1) for n in (counts.scaled, counts.codes))
    label = "before the cast"
    ax.bar(places + 0.5, before, width=0.85, color=style.BLUE, zorder=2, label=label)
    edges, outline = [*places, places[-1] + 1], [*after, after[-1]]
    ax.step(edges, outline, where="post", label="after", color=style.BLACK, lw=1.1)
    left, right = lowest - 1.2, highest + 2.2
    for begin, end, shade, alpha, label in (
        (bottom, fmt.emin, style.ORANGE, 0.25, "subnormal"),
        (left, bottom, style.VERMILLION, 0.3, "becomes zero"),
        (np.log2(fmt.max), right, style.PURPLE, 0.3, "beyond max"),
    ):
        ax.axvspan(begin, end, color=shade, alpha=alpha, linewidth=0, zorder=0, label=label)
    ax.set_xlim(left, right)
    style.label_powers(ax.xaxis, lowest, highest + 1, ticks=7)
    measured = stats.statistics(x, q)
    said = (
        f"{100 * measured.underflow_rate:.2g} % become zero, "
        f"{100 * measured.overflow_rate:.2g} % are clipped"
    )
    ax.set(xlabel="magnitude after scaling", ylabel="% of elements", title=said)
    style.legend(ax, loc="upper left", ncols=2)
    ax.set_ylim(0, 1.45 * max(before.max(), after.max(), 1e-3))  # room for the legend
    return style.plain(ax)


def code_difference(ax: Axes, a: Quantized, b: Quantized, *, most: int = 4) -> Axes:
    """For every element of a matrix, by how many codes b's magnitude exceeds a's; the title says
    how many codes are equal, NaNs being one.

    Beyond ``most`` the color stays the same; NaNs are white.

    Shapes:   codes of both [M, K], of one format.
    Raises:   ValueError: codes of another shape or format.
    """
    if a.fmt != b.fmt or _matrix(a.codes).shape != _matrix(b.codes).shape:
        raise ValueError(
            f"codes are compared in one format and shape; got {a.fmt.name} {a.codes.shape} and "
            f"{b.fmt.name} {b.codes.shape}. Quantize one tensor alike."
        )
    magnitudes = [(q.codes & ~np.uint8(q.fmt.sign_bit)).astype(float) for q in (a, b)]
    nans = np.isnan(cast.decode(a.codes, a.fmt)) | np.isnan(cast.decode(b.codes, b.fmt))
    codes = [cast.canonical_nans(q.codes, q.fmt) for q in (a, b)]
    unlike = np.count_nonzero(codes[0] != codes[1])
    some = f"all but {unlike:,}" if 2 * unlike < nans.size else f"{nans.size - unlike:,}"
    said = f"{some} of {nans.size:,}" if unlike else f"all {nans.size:,}"
    ax.set_title(f"{said} codes equal")
    further = np.where(nans, np.nan, magnitudes[1] - magnitudes[0])
    image = style.cells(ax, further, "RdBu_r", -most - 0.5, most + 0.5)
    bar = ax.figure.colorbar(image, ax=ax, fraction=0.046, ticks=range(-most, most + 1))
    bar.set_label("codes further from zero")
    return style.plain_map(ax)


def _matrix(x) -> np.ndarray:
    """x as an array; ValueError unless a matrix: matplotlib draws [M, K, 3] in colors."""
    x = cast.array(x)
    if x.ndim != 2 or not x.size:
        raise ValueError(
            f"a map is of a matrix [M, K] with elements; got shape {x.shape}. Reshape it, as by "
            "x.reshape(-1, x.shape[-1])."
        )
    return x
