"""Read losses by step from the logs of other trainers.

*.csv            a header, then a row for each record
*.jsonl          an object for each record
events.out.*     TensorBoard events, or a directory of them; needs tensorboardX
any other text   a console log of torchtitan or Megatron-LM

Sources: torchtitan, components/metrics.py, MetricsProcessor.log; Megatron-LM, training/training.py,
training_log; TensorFlow, core/lib/io/record_writer.h, the framing of events.
"""

import csv
import math
import os
import re
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from fp8ref.shared import console, extras, files
from fp8ref.shared.errors import ConfigError

__all__ = ["read"]

STEPS = ("step", "_step", "global_step", "iteration", "iter")
"""Names of a column of steps, without regard to case; the first that is there counts."""

LOSSES = (
    *("loss", "train/loss", "train_loss", "training_loss", "lm loss", "lm_loss"),
    *("loss_metrics/global_avg_loss", "train/lm_loss"),
)
"""Names of a column or tag of training losses, without regard to case; the first one counts."""

LONGEST = 4096
"""The most characters of a console's line that is searched: the search is quadratic in them."""

_COLOR = re.compile(r"\x1b\[[0-9;]*m")
_NUMBER = r"([-+0-9.eE]+|nan|inf)"
_NUMBERS = re.compile(
    r"\s*[-+]?([0-9]+(\.[0-9]*)?(e[-+]?[0-9]+)?|\.[0-9]+(e[-+]?[0-9]+)?|nan|inf(inity)?)\s*",
    re.IGNORECASE | re.ASCII,
)
"""What a column holds."""

_CONSOLES = (
    re.compile(rf"(?<!validate )\bstep:\s*(\d+)\s.*?\bloss:\s*{_NUMBER}"),  # torchtitan
    re.compile(rf"\biteration\s+(\d+)\s*/.*?\blm loss:\s*{_NUMBER}"),  # Megatron-LM
)


@dataclass(frozen=True, kw_only=True)
class Log:
    """Losses of a run that fp8ref did not make; ``losses`` by ascending step, in nats."""

    name: str
    losses: dict[int, float]
    finished = True
    diverged = ""

    @cached_property
    def seeds(self) -> str:
        """Its own name: nothing else is known of its seeds."""
        return self.name


def read(path: Path, *, loss: str | None = None) -> Log:
    """The losses in a log, by line. A torn last line, of a running trainer, is noted and skipped.

    loss      the column or tag of the losses; None: the first of ``LOSSES`` that is there.
    Raises:   ConfigError: it cannot be read; it has no steps and losses; a step occurs with two
              losses; a loss that is not finite.
    """
    losses: dict[int, float] = {}
    try:
        for step, value in _records(path, loss):
            if not math.isfinite(value):
                raise ConfigError(
                    f"{path}: the loss of step {step} is {value}; losses are finite. Cut the "
                    "log before it, or leave it out."
                )
            if losses.setdefault(step, value) != value:
                raise ConfigError(
                    f"{path}: step {step} has losses {losses[step]} and {value}. Leave one of "
                    "them out; a resumed run repeats steps."
                )
    except ConfigError:
        raise
    except (OSError, ValueError, csv.Error) as error:
        raise ConfigError(
            f"{path} cannot be read ({getattr(error, 'strerror', None) or error}). Name a run, "
            "or a log."
        ) from error
    if not losses:
        raise ConfigError(
            f"{path} has no step with a loss. A log is CSV or JSON Lines with a step and a loss "
            f"({', '.join(LOSSES[:3])}, ..., or --loss NAME), a console log of torchtitan or "
            "Megatron-LM, or TensorBoard events."
        )
    return Log(name=console.one_line(str(path)), losses=dict(sorted(losses.items())))


def _records(path: Path, loss: str | None) -> Iterator[tuple[int, float]]:
    if path.is_dir():
        events = sorted(path.glob("**/events.out.tfevents.*"))
    else:
        events = [path] * ("tfevents" in path.name)
    if events:
        yield from _tagged(path, events, loss)
    elif path.suffix == ".csv":
        yield from _table(_rows(path, loss), path, loss)
    elif path.suffix in (".jsonl", ".ndjson", ".json"):
        yield from _table(_objects(path, loss), path, loss)
    else:
        yield from _printed(path)


def _tagged(path: Path, events: list[Path], loss: str | None) -> Iterator[tuple[int, float]]:
    """The values of the tag of losses; a later file, of a resumed run, replaces earlier steps."""
    tagged: dict[str, dict[int, float]] = {}
    for file in events:
        for tag, step, value in _events(file):
            tagged.setdefault(tag, {})[step] = value
    name = _named(tagged, (loss,) if loss else LOSSES)
    if name is None:
        raise ConfigError(
            f"{path} has no tag of losses; it has {', '.join(tagged) or 'none'}. Name one with "
            "--loss."
        )
    yield from tagged[name].items()


def _lines(path: Path) -> Iterator[str]:
    """The lines of a text with their ends."""
    for number, line in enumerate(files.read_lines(path)):
        try:
            # spreadsheets begin a file with a byte order mark
            yield line.decode("utf-8" if number else "utf-8-sig")
        except UnicodeDecodeError:
            if line.endswith(b"\n"):
                raise
            _leave_out(path)  # cut within a character


def _leave_out(path: Path) -> None:
    console.say(
        f"{path}: its last line or record is torn, as of a run that goes on; it is left out"
    )


def _printed(path: Path) -> Iterator[tuple[int, float]]:
    """The records of a console log."""
    for text in _lines(path):
        for line in text.splitlines(keepends=True):  # progress bars end lines otherwise too
            if len(line) > LONGEST:
                continue
            plain = _COLOR.sub("", line)
            matches = (pattern.search(plain) for pattern in _CONSOLES)
            if match := next(filter(None, matches), None):
                if match.end() == len(plain):  # more digits may follow
                    _leave_out(path)
                    continue
                yield _record(match[1], match[2], f"{path} has the line {line[:200].rstrip()!r}")


def _rows(path: Path, loss: str | None) -> Iterator[dict]:
    """The rows of a CSV file.

    A last one without an end counts, as spreadsheets write it, unless it lacks a number.
    """
    ended = True

    def lines() -> Iterator[str]:
        nonlocal ended
        for text in _lines(path):
            for line in text.splitlines(keepends=True):
                ended = line.endswith(("\n", "\r"))
                yield line

    csv.field_size_limit(files.LINE)  # a column that is not read may hold texts
    rows = csv.reader(lines())
    names = next(rows, [])
    _check_names(names, loss, str(path))
    read = {_named(names, STEPS), _named(names, (loss,) if loss else LOSSES)}
    for row in rows:
        if not ended and 0 < len(row) < len(names):
            _leave_out(path)
            continue
        if not ended and len(row) == len(names) and names[-1] in read:
            if names[-1] == _named(names, STEPS) or not _NUMBERS.fullmatch(row[-1]):
                _leave_out(path)  # of a step that lacks digits the row would be another's
                continue
            console.say(
                f"{path}: its last line has no end; of a run that goes on, the last digits of "
                f"{row[-1]} may be missing"
            )
        yield dict(zip(names, row, strict=False))


def _check_names(names: Sequence[str], loss: str | None, where: str) -> None:
    """ConfigError for two columns of the name that is read: one would be lost."""
    for name in (_named(names, STEPS), _named(names, (loss,) if loss else LOSSES)):
        count = sum(str(column).lower() == str(name).lower() for column in names)
        if name is not None and count > 1:
            raise ConfigError(
                f"{where} has {name.lower()!r} {count} times. Rename one of them, or leave it out."
            )


class _Row(dict):
    """An object of JSON that knows each of its keys, also those that occur twice."""

    def __init__(self, pairs: list[tuple[str, Any]]) -> None:
        super().__init__(pairs)
        self.names = [name for name, _ in pairs]


def _objects(path: Path, loss: str | None) -> Iterator[dict]:
    for number, line in enumerate(_lines(path), 1):
        try:
            value = files.parse_json(line, _Row)
        except ValueError as error:
            if not line.endswith("\n"):
                return _leave_out(path)
            raise ConfigError(
                f"{path}, line {number}, is not JSON ({error}). Repair it, or leave it out."
            ) from error
        if isinstance(value, _Row):
            _check_names(value.names, loss, f"{path}, line {number},")
            yield value


def _table(rows: Iterable[dict], path: Path, loss: str | None) -> Iterator[tuple[int, float]]:
    """The (step, loss) of each row that has both; rows of other metrics lack one."""
    seen: dict[str, None] = {}
    has_rows = False
    for row in rows:
        seen.update(dict.fromkeys(str(key) for key in row))
        step, value = _named(row, STEPS), _named(row, (loss,) if loss else LOSSES)
        if step is None or value is None:
            continue
        if row[value] in (None, "") or row[step] in (None, ""):
            continue
        where = f"{path} has {step} = {row[step]!r} with {value} = {row[value]!r}"
        yield _record(row[step], row[value], where)
        has_rows = True
    if seen and not has_rows:
        raise ConfigError(
            f"{path} has no row with a step ({', '.join(STEPS)}) and a loss "
            f"({loss or ', '.join(LOSSES)}); its columns are {', '.join(seen)}. Name the loss "
            "with --loss."
        )


def _record(step: Any, loss: Any, where: str) -> tuple[int, float]:
    """A step and its loss, of text or JSON.

    Raises:   ConfigError: no numbers; a step that is not whole, which would become another's.
    """
    try:
        # a text as float() takes it, but for its digits of other scripts and underscores
        for field in (step, loss):
            fits = isinstance(field, str | int | float) and not isinstance(field, bool)
            if not fits or not re.fullmatch(_NUMBERS, str(field)):
                raise ValueError
        number, value = float(step), float(loss)
    except (ValueError, OverflowError) as error:
        raise ConfigError(f"{where}; both are numbers. Repair the row.") from error
    # from 2^53 on a float may be another number's
    if not (0 <= number < 2**53 and number == int(number)):
        raise ConfigError(
            f"{where}; a step is a whole number from 0 to 2^53 - 1. Repair the row, or name "
            "another column."
        )
    return int(number), value


def _named(columns: Iterable[str], names: Iterable[str]) -> str | None:
    """The first of the names among the columns, as the columns spell it."""
    lower = {str(column).lower(): column for column in columns}
    return next((lower[name.lower()] for name in names if name.lower() in lower), None)


def _events(path: Path) -> Iterator[tuple[str, int, float]]:
    """(tag, step, value) of every scalar in a file of events, up to a torn last record.

    Raises:   ValueError: a record whose checksums do not hold, or that is no event.
    """
    extras.require("test", "reading TensorBoard events", "tensorboardX")
    from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
    from tensorboardX.proto.event_pb2 import Event  # type: ignore[import-untyped]
    from tensorboardX.record_writer import masked_crc32c  # type: ignore[import-untyped]

    with files.open_regular(path) as file:
        at, size = 0, os.fstat(file.fileno()).st_size
        while head := file.read(12):  # length (8), its CRC (4); then the event, its CRC (4)
            if len(head) < 12:
                return _leave_out(path)
            length, length_checksum = struct.unpack("<QI", head)
            if length_checksum != masked_crc32c(head[:8]):
                raise ValueError(f"the record of {path.name} at byte {at:,} is damaged")
            if length > size - at - 16:
                return _leave_out(path)
            if length > files.TEXT:
                raise ValueError(
                    f"the record of {path.name} at byte {at:,} is larger than {files.TEXT:,} bytes"
                )
            content = file.read(length)
            if file.read(4) != struct.pack("<I", masked_crc32c(content)):
                raise ValueError(f"the record of {path.name} at byte {at:,} is damaged")
            at += 16 + length
            try:
                event = Event.FromString(content)
            except DecodeError as error:
                raise ValueError(f"a record of {path.name} is no event") from error
            for value in event.summary.value:
                if (number := _scalar(value)) is not None:
                    where = f"{path} has step {event.step} with {value.tag} = {number}"
                    yield value.tag, *_record(event.step, number, where)


def _scalar(value) -> float | None:
    """The number of a summary's value, which newer writers give as a tensor; else None."""
    if value.HasField("simple_value"):
        return value.simple_value
    if not value.HasField("tensor") or value.tensor.dtype != 1:  # DT_FLOAT
        return None
    content, numbers = value.tensor.tensor_content, value.tensor.float_val
    if len(content) == 4:
        return struct.unpack("<f", content)[0]
    return numbers[0] if len(numbers) == 1 else None
