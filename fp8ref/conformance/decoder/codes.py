"""Ask a decoder for all codes: how they are packed, and what each is taken for."""

import dataclasses

import numpy as np

from fp8ref.conformance.cast.outputs import FLOATS
from fp8ref.conformance.decoder import readings
from fp8ref.conformance.decoder.report import Fault, Report, first, place
from fp8ref.conformance.decoder.subject import Decoder
from fp8ref.conformance.inputs import dtypes
from fp8ref.conformance.kit.arrays import same_bits
from fp8ref.conformance.kit.finding import Counterexample, Finding, show
from fp8ref.sim.quantize import cast

SHAPE = (256, 512)  # of codes, [M, K]: several tiles, and blocks of every granularity

SPLITS = (4, 8, 16, 32, 64, 128, 256, 512)
"""Lengths of blocks whose first half may lie in the low halves of bytes, as in GGML's."""

SHOWN = 4  # the most codes without a name that are shown


def ask_codes(decoder: Decoder, report: Report) -> Decoder:
    """Ask for all codes under a scale of 1; the decoder, told how it packs them."""
    fmt = decoder.fmt
    row, column = np.indices(SHAPE)
    # each code at each column, and neighbors, and places in a pair, that differ
    codes = ((column * np.where(row % 2, -1, 1) + row // 2) % (1 << fmt.bits)).astype(np.uint8)
    right = cast.decode(codes, fmt)
    decoded = decoder.decode(codes)
    numbers, faults = decoded.numbers, list[Fault]()
    if decoder.packing == "pairs" and not same_bits(numbers, right).all():
        words, numbers, decoder = _packing(decoder, codes, numbers, right)
        if words:
            wrong = first(~same_bits(decoded.numbers, right))
            witness = _code_witness(decoder, codes, decoded.numbers, right, wrong, "F-5")
            faults.append(Fault(words, witness))
    if fmt.bits == 4:
        report.add("packing", faults, decoder.packing, "codes of 4 bits in bytes")
    faults = _wrong_codes(decoder, codes, numbers, right)
    evidence = f"{1 << fmt.bits} of {1 << fmt.bits} codes, each at {codes.size >> fmt.bits} places"
    report.add("codes", faults, f"of {fmt}", evidence)
    report.findings.append(Finding("output", decoded.dtype, f"codes as {decoder.codes_as}"))
    return decoder


def _packing(
    decoder: Decoder, codes: np.ndarray, numbers: np.ndarray, right: np.ndarray
) -> tuple[str, np.ndarray, Decoder]:
    """(how pairs are read otherwise, in words; the numbers as if they were read rightly; the
    decoder, asked so), where more numbers are right then.
    """
    high_first = dataclasses.replace(decoder, packing="pairs, high first")
    swapped = high_first.decode(codes).numbers
    options = [("of a pair the high half comes first", swapped, high_first)]
    mistakes = ("second", "first", 0, 1), ("first", "second", 1, 0)
    for name, kept, one, other in mistakes:
        pairs = numbers.reshape(*numbers.shape[:-1], -1, 2)
        expected = right.reshape(pairs.shape)
        filled = np.where(np.arange(2) == other, expected, pairs).reshape(numbers.shape)
        if (pairs[..., other] == 0).all():
            options.append((f"the {name} number of a pair is 0", filled, decoder))
        if same_bits(pairs[..., other], expected[..., one]).all():
            options.append((f"a pair has its {kept} number twice", filled, decoder))
    if (numbers[..., 1::2] == 0).all():
        half = right[..., : right.shape[-1] // 2]
        filled = right if same_bits(numbers[..., ::2], half).all() else numbers
        options.append(("every second number is 0", filled, decoder))
    for block in SPLITS:
        halves = numbers.reshape(*numbers.shape[:-1], -1, 2, block // 2)
        for words, order in (("low", halves), ("high", halves[..., ::-1, :])):
            name = f"of {block // 2} bytes all {words} halves come first"
            merged = np.moveaxis(order, -2, -1).reshape(numbers.shape)
            options.append((name, merged, decoder))
            woven = np.moveaxis(numbers.reshape(*order.shape[:-2], -1, 2), -1, -2)
            woven = woven if words == "low" else woven[..., ::-1, :]
            name = f"numbers of both halves of {block} alternate"
            options.append((name, woven.reshape(numbers.shape), decoder))
    best = max(options, key=lambda option: same_bits(option[1], right).mean())
    if same_bits(best[1], right).mean() > same_bits(numbers, right).mean():
        return best
    return "", numbers, decoder


def _wrong_codes(
    decoder: Decoder, codes: np.ndarray, numbers: np.ndarray, right: np.ndarray
) -> list[Fault]:
    fmt = decoder.fmt
    wrong = ~same_bits(numbers, right)
    if not wrong.any():
        return []
    table = numbers.reshape(-1)[np.unique(codes, return_index=True)[1]]  # by its first place
    if not same_bits(table[codes], numbers).all():
        witness = _code_witness(decoder, codes, numbers, right, first(wrong), "F-1")
        return [Fault(f"a code's number depends on its place: {place(wrong)}", witness)]
    integer = cast.encode(np.float32(1), decoder.scale_fmt) if decoder.scale_fmt else 1
    product = readings.right_numbers(fmt) * np.float32(integer)
    products = (dtypes.rounded(product, dtype) for dtype in FLOATS[:3])
    if integer != 1 and any(same_bits(table, numbers).all() for numbers in products):
        witness = _code_witness(decoder, codes, numbers, right, first(wrong), "S-8")
        return [Fault("codes of scales are read as integers", witness)]
    explained, left = readings.names(table, fmt)
    at = first(wrong & left[codes]) if left.any() else first(wrong)
    witness = _code_witness(decoder, codes, numbers, right, at, "F-1")
    if left.any():
        rest = np.flatnonzero(left)
        shown = [f"0x{code:02X} as {show(float(table[code]))}" for code in rest[:SHOWN]]
        more = f" and {rest.size - SHOWN} others" if rest.size > SHOWN else ""
        explained.append(f"codes are read otherwise: {', '.join(shown)}{more}")
    return [Fault(" and ".join(explained), witness)]


def _code_witness(
    decoder: Decoder,
    codes: np.ndarray,
    numbers: np.ndarray,
    right: np.ndarray,
    at: tuple[int, int],
    clause: str,
) -> Counterexample:
    words = f"code 0x{int(codes[at]):02X} of {decoder.fmt} at [{at[0]}, {at[1]}]"
    return Counterexample(words, show(float(numbers[at])), show(float(right[at])), clause)
