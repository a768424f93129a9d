"""How many 32-byte sectors of memory a Triton kernel of inductor touches, counted from its source.

A GPU moves sectors: a byte that stands alone costs 32. The lanes of a warp share sectors where an
index grows by one along the axis that they run along. In a pointwise kernel each access has the
best of the axes that the kernel is tiled by. A reduction has one axis of lanes, which is here the
one with the fewest sectors: blocks of the other are as short as one element.

    found = sectors.accesses(source)
    moved = sum(access.sectors for access in found) * sectors.SECTOR
"""

import dataclasses
import math
import re

import numpy as np

SECTOR = 32
LANES = 1024
WIDTHS = {
    "fp8e4nv": 1,
    "fp8e5": 1,
    "i8": 1,
    "u8": 1,
    "i1": 1,
    "bf16": 2,
    "fp16": 2,
    "fp32": 4,
    "i32": 4,
    "fp64": 8,
    "i64": 8,
}
"""Bytes of an element, by Triton's name of its dtype in a signature."""

_AXES = ("x", "y", "z", "r0_", "r1_")
_NUMEL = re.compile(r"^    (\w+?)numel = (\d+)$", re.MULTILINE)
_NAMED = re.compile(r"^\s+([xyz]\d+|r\d_\d+|[xyz]index|r\d_index) = (.+)$", re.MULTILINE)
_ACCESS = re.compile(r"tl\.(load|store)\((\w+) \+ \(")
_BROADCAST = re.compile(r"^tl\.broadcast_to\((.*), \[.*\]\)$")
_SPREAD = re.compile(r"tl\.full\(\[[^\]]*\], 0, tl\.int32\)(\.broadcast_to\([^)]*\))?")
_SPLIT = re.compile(r"'RSPLIT_SIZE': (\d+)")
_PARTIAL = re.compile(r"tl\.program_id\(0\) \+ \d+ \* tl\.num_programs\(0\)")
"""The row, in a workspace, of partial sums over the rows that one program reads: where inductor
reduces both axes in one kernel.
"""
_WORD = re.compile(r"[a-z]\w*")
_TYPES = re.compile(r"'(\w+)': '\*(\w+)'")


@dataclasses.dataclass(frozen=True)
class Access:
    """A load or a store of a kernel, all its elements together.

    bytes    of the elements, each once. What is masked counts: no mask is read.
    sectors  that they touch; elements of one warp that share one touch it once.
    """

    store: bool
    pointer: str
    bytes: int
    sectors: int

    @property
    def scattered(self) -> bool:
        """Whether a sector serves fewer than 8 of its bytes, of accesses of more than a
        mebibyte.
        """
        return self.bytes > 2**20 and self.bytes < 8 * self.sectors


def accesses(source: str) -> list[Access]:
    """All loads and stores of a kernel that inductor generated with static shapes.

    Raises:   ValueError: an index that depends on loaded values, or another form of access.
    """
    body = source[source.index("def triton_") :]
    numels = {axis: int(count) for axis, count in _NUMEL.findall(body) if axis in _AXES}
    widths = {name: WIDTHS[kind] for name, kind in _TYPES.findall(source)}
    lines = [line for line in body.splitlines() if "tl.load(" in line or "tl.store(" in line]
    matched = [_ACCESS.search(line) for line in lines]
    if None in matched:
        raise ValueError(
            "accesses have the form pointer + (index); got "
            f"{lines[matched.index(None)].strip()}. Teach sectors.py this form."
        )
    # {axis: [(access, its sectors with lanes along the axis)]}; a broadcast over all lanes is one
    # sector
    named = [(name, code) for name, code in _NAMED.findall(body) if not name.endswith("index")]
    by_axis: dict[str, list[Access]] = {axis: [] for axis in numels}
    for match in matched:
        kind, pointer = match.groups()
        index = _closed(match.string[match.end() :])
        if _PARTIAL.fullmatch(index):
            partial = _partial_sums(source, pointer, numels, widths[pointer])
            for axis in numels:
                by_axis[axis].append(partial)
            continue
        index = _SPREAD.sub("0", _BROADCAST.sub(r"\1", index))
        used = _used(index, named, numels)
        elements = math.prod(numels[axis] for axis in used)
        for axis, count in numels.items():
            lanes = min(LANES, count) if axis in used else 1
            touched = _touched(index, named, axis, lanes, widths[pointer])
            by_axis[axis].append(
                Access(
                    kind == "store",
                    pointer,
                    elements * widths[pointer],
                    math.ceil(elements * touched / lanes),
                )
            )
    if any(axis.startswith("r") for axis in numels):
        return min(by_axis.values(), key=lambda found: sum(access.sectors for access in found))
    return [
        min(each, key=lambda access: access.sectors) for each in zip(*by_axis.values(), strict=True)
    ]


def _partial_sums(source: str, pointer: str, numels: dict[str, int], width: int) -> Access:
    """The store of each program's partial sums, a row of all columns."""
    rows_of_program = _SPLIT.search(source)
    if rows_of_program is None:
        raise ValueError(
            "a kernel with partial sums says how many rows a program reads; got no RSPLIT_SIZE. "
            "Teach sectors.py this form."
        )
    programs, columns = (
        math.ceil(numels["x"] / int(rows_of_program[1])),
        math.prod(n for axis, n in numels.items() if axis.startswith("r")),
    )
    return Access(
        True, pointer, programs * columns * width, programs * math.ceil(columns * width / SECTOR)
    )


def _closed(text: str) -> str:
    """A text up to the bracket that closes one opened before it."""
    depth = 1
    for i, letter in enumerate(text):
        depth += (letter == "(") - (letter == ")")
        if depth == 0:
            return text[:i]
    raise ValueError(f"brackets of an index close; got {text}.")


def _values(named: list[tuple[str, str]], axis: str, lanes: int) -> dict[str, np.ndarray]:
    """{name: its value in each lane}, of lanes along an axis, at the start of all others."""
    values = {f"{one}index": np.arange(lanes) * (one == axis) for one in _AXES}
    for name, code in named:
        values[name] = eval(code, {}, values)
    return values


def _touched(index: str, named: list[tuple[str, str]], axis: str, lanes: int, width: int) -> int:
    """How many sectors that many lanes touch."""
    addresses = np.broadcast_to(_evaluated(index, _values(named, axis, lanes)) * width, lanes)
    return len(np.unique(addresses // SECTOR))


def _used(index: str, named: list[tuple[str, str]], numels: dict[str, int]) -> list[str]:
    """The axes that an index is made of."""
    made = set(_WORD.findall(index))
    for name, code in reversed(named):
        if name in made:
            made.update(_WORD.findall(code))
    return [axis for axis in numels if f"{axis}index" in made]


def _evaluated(index: str, values: dict[str, np.ndarray]) -> np.ndarray:
    try:
        return np.asarray(eval(index, {}, values))
    except NameError as error:
        raise ValueError(
            f"an index is one of the kernel's axes; got {index}. Teach sectors.py what it loads."
        ) from error
