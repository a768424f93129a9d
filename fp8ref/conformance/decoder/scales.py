"""Ask a dequantizer which scale it multiplies each element by, and how."""

import dataclasses

import numpy as np

from fp8ref.conformance.decoder import products, scale_index
from fp8ref.conformance.decoder.codes import SHAPE
from fp8ref.conformance.decoder.report import Fault, Report, first, place
from fp8ref.conformance.decoder.subject import Decoder
from fp8ref.conformance.kit import subject as subjects
from fp8ref.conformance.kit.finding import Counterexample, show
from fp8ref.conformance.kit.subject import RefusedError
from fp8ref.sim.quantize import cast

INDEX_SHAPES = ((250, 768), (384, 512), (384, 384))
"""The shapes in which scales' index is read: one's rows fill no tile, and one has a square grid."""


def ask_scales(decoder: Decoder, report: Report) -> Decoder:
    """Ask which scale each element is multiplied by, how products round, and scales at ends; the
    decoder, which may divide."""
    two = decoder.decode(decoder.ones(SHAPE), 2.0).numbers
    verb = {2.0: "multiplies", 0.5: "divides", 1.0: "is ignored"}.get(float(two[0, 0]), "neither")
    faults = []
    if verb == "divides":
        decoder = dataclasses.replace(decoder, divides=True)
        parameter = subjects.needed(decoder.tested.function)[1:2] or [""]
        if decoder.scale_fmt is not None or "inv" in parameter[0]:
            verb = "it divides by scale_inv"
    if verb not in ("multiplies", "divides"):
        name = "its scale is ignored" if verb == "is ignored" else verb
        words = "code of 1 under a scale of 2 in all blocks"
        faults = [Fault(name, Counterexample(words, show(float(two[0, 0])), "2", "S-8"))]
    report.add("scale", faults, verb, f"a scale of 2, as {decoder.scales_as}")
    if not faults and decoder.granularity != "tensorwise":
        report.add("index", *_index(decoder))
    if not report.faults:
        report.add("product", *_products(decoder))
    if not report.faults:
        report.add("ends of scales", *_ends(decoder))
    return decoder


def _index(decoder: Decoder) -> tuple[list[Fault], str, str]:
    faults, shown = list[Fault](), []
    for shape in INDEX_SHAPES:
        try:
            index = scale_index.read_index(decoder, shape)
        except RefusedError:
            continue
        shown.append(shape)
        right = scale_index.expected_index(decoder, shape)
        wrong = index != right
        if not wrong.any():
            continue
        at = first(wrong)
        words = scale_index.name(decoder, index, right)
        words = words or f"an element reads another scale: {place(wrong)}"
        got = "none" if index[at] < 0 else f"number {index[at]}"
        witness = Counterexample(
            f"element [{at[0]}, {at[1]}] of {list(shape)}, {decoder.granularity}",
            f"its scale is {got}",
            f"number {right[at]}",
            "S-6",
        )
        faults.append(Fault(words, witness))
        break
    sizes = ", ".join(str(list(shape)) for shape in shown)
    way = f"{decoder.granularity}, {decoder.layout.name}"
    return faults, way, f"each scale alone, in {sizes}"


def random(decoder: Decoder, shape: tuple[int, ...], seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Codes of any numbers, and scales that the granularity's hardware holds."""
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 1 << decoder.fmt.bits, shape).astype(np.uint8)
    if decoder.granularity is None:
        return codes, np.ones(())
    scales = np.exp2(rng.uniform(-4, 4, decoder.scale_shape(shape))).astype(np.float32)
    if decoder.scale_fmt is not None:
        scales = cast.round_to(scales, decoder.scale_fmt, saturate=True)
    return codes, scales


def _products(decoder: Decoder) -> tuple[list[Fault], str, str]:
    codes, scales = random(decoder, SHAPE, 1)
    # odd in its last place, so that each order of products rounds otherwise
    odd = float(np.nextafter(np.float32(0.0123), np.float32(1)))
    tensor = odd if decoder.levels == 2 else 1.0
    decoded = decoder.decode(codes, scales, tensor)
    words, wrong = products.wrong_products(decoder, codes, scales, tensor, decoded)
    evidence = f"{codes.size:,} products, as {decoded.dtype}"
    if not wrong.any():
        return [], "S-8's", evidence
    witness = _product_witness(decoder, codes, scales, tensor, decoded.numbers, first(wrong))
    return [Fault(words or "products are rounded otherwise", witness)], "", evidence


def _product_witness(
    decoder: Decoder,
    codes: np.ndarray,
    scales: np.ndarray | np.float32,
    tensor: float,
    numbers: np.ndarray,
    at: tuple[int, int],
) -> Counterexample:
    scale = np.broadcast_to(np.float32(scales), decoder.scale_shape(codes.shape))
    number = cast.decode(codes[at], decoder.fmt)
    scale_at = decoder.spread(scale, codes.shape)[at]
    words = f"code 0x{int(codes[at]):02X} ({show(float(number))})"
    words += f" under scale_inv {show(float(scale_at))}"
    words += f" and the tensor's {show(tensor)}" if decoder.levels == 2 else ""
    expected = decoder.expected(codes, scales, "float32", tensor)[at]
    return Counterexample(words, show(float(numbers[at])), show(float(expected)), "S-8")


def _ends(decoder: Decoder) -> tuple[list[Fault], str, str]:
    codes, ends = random(decoder, SHAPE, 2)[0], products.ends(decoder)
    faults, refused = [], []
    for end in ends:
        try:
            words, wrong, decoded = products.wrong_end(decoder, codes, end)
        except RefusedError:
            refused.append(f"{end:g}")
            continue
        if words:
            at = first(wrong)
            witness = _product_witness(decoder, codes, end, 1.0, decoded.numbers, at)
            faults.append(Fault(words, witness))
    evidence = f"{len(ends)} scales from {min(ends):g} to NaN"
    evidence += "; subnormal products may be 0" if decoder.may_flush else ""
    evidence += f"; it raises for {', '.join(refused)}" if refused else ""
    return faults, "read as they are", evidence
