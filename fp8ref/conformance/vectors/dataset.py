"""A data set of test vectors with their answers: a folder of files, with a manifest of checksums.

The same fp8ref and seed write the same bytes. The files are text as ``fp8ref vectors gen`` writes
it, with the simulator's answers on each line, so that ``fp8ref vectors verify`` judges them too.
"""

import hashlib
import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from fp8ref import __version__
from fp8ref.conformance.inputs import dtypes
from fp8ref.conformance.kit.finding import Described
from fp8ref.conformance.vectors import cast, decode, format, gemm, operations
from fp8ref.formats import FP8_FORMATS, QUANTIZED_FORMATS
from fp8ref.policy import FP4_POLICIES, POLICIES
from fp8ref.shared import console, files, package_data
from fp8ref.shared.errors import require
from fp8ref.spec.attention.variants import VARIANTS

__all__ = ["MANIFEST", "MOST", "SCHEMA", "Checked", "check", "sets", "write"]

SCHEMA = 1
"""The version of the manifest's keys."""

MOST = 32 << 20
"""The most bytes of a data set."""

MANIFEST = "manifest.json"
"""The name of the manifest in the folder."""

README = package_data.tables(__file__, "dataset")["readme"].format(
    version=__version__, manifest=MANIFEST
)
"""The text of README.md in the folder."""


def sets() -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    """(operation, settings, rules) of each file: every operation, format and policy."""
    for fmt, source in itertools.product(cast.NAMES, ("float32", "bfloat16", "float16")):
        yield "cast", {"format": fmt, "source": source, "count": 500}, {}
    for fmt in FP8_FORMATS:
        yield "cast", {"format": fmt, "count": 500}, {"saturate": False}
    for fmt in decode.NAMES:
        yield "decode", {"format": fmt, "count": 500}, {}
    for name, policy in POLICIES.items():
        made = "e8m0" if policy.e8m0 is not None else policy.stored
        for fmt in QUANTIZED_FORMATS if name in ("torchao", "mx_floor") else ("e4m3fn",):
            yield "scale", {"format": fmt, "policy": name, "count": 500}, {"made": made}
    blocks = ("rowwise", "blockwise_1x128", "blockwise_128x128")
    ways = [("torchao", way, fmt) for fmt in FP8_FORMATS for way in ("tensorwise", *blocks)]
    ways += [("mx_floor", way, fmt) for fmt in QUANTIZED_FORMATS for way in ("mx_1x32", "mx_32x32")]
    ways += [(policy, "nvfp4_1x16", "e2m1fn") for policy in FP4_POLICIES]
    for chosen, granularity, fmt in ways:
        settings = {"format": fmt, "policy": chosen, "granularity": granularity, "count": 10}
        made = "e8m0" if chosen == "mx_floor" else "scale_inv"
        yield "quantize", settings, {"made": made}
    for a, b in itertools.product(FP8_FORMATS, FP8_FORMATS):
        yield "gemm", {"format": a, "format_b": b, "count": 7}, {}
    for granularity in ("rowwise", "blockwise_1x128", "blockwise_128x128", "mx_1x32"):
        yield "gemm", {"format": "e4m3fn", "granularity": granularity, "count": 7}, {}
    for dtype in ("bfloat16", "float16"):
        yield "gemm", {"format": "e4m3fn", "out_dtype": dtype, "count": 7}, {}
    for plan in gemm.ACCUMULATE[1:]:
        yield "gemm", {"format": "e4m3fn", "count": 7}, {"accumulate": plan}
    for name, mask in itertools.product(VARIANTS, ("full", "causal")):
        settings = {"variant": name, "mask": mask, "shape": "1,2,1,4,144,32", "count": 4}
        yield "attention", settings, {}


def write(folder: Path, seed: int = 0) -> "Checked":
    """Write a data set to a folder that is new or empty, and check it.

    Raises:   ValueError: a folder with files in it; a seed out of range.
    """
    require(
        not folder.exists() or not any(folder.iterdir()),
        f"a data set needs a folder that is new or empty; got {folder}. Name another.",
    )
    dtypes.check_random(seed, 0)
    listed = [_written(folder, "README.md", README, {})]
    for operation, settings, rules in console.counted("vectors dataset", list(sets())):
        settings = settings | {"seed": seed}
        lines = list(operations.generate(operation, settings, rules))
        words = [f"{v}" for k, v in settings.items() if k not in ("count", "seed", "shape")]
        words += [f"{k}_{v}".lower() for k, v in rules.items()]
        text = "".join(f"{line}\n" for line in lines)
        content: dict[str, Any] = {"operation": operation, "settings": settings, "rules": rules}
        content["vectors"] = len(lines) - 2
        listed.append(_written(folder, f"{operation}/{'-'.join(words)}.txt", text, content))
    size = sum(entry["bytes"] for entry in listed)
    assert size <= MOST
    manifest = {"schema": SCHEMA, "fp8ref": __version__, "text_format": format.VERSION}
    manifest |= {"seed": seed, "bytes": size, "files": listed}
    (folder / MANIFEST).write_bytes(json.dumps(manifest, indent=1).encode() + b"\n")
    return check(folder)


def _written(folder: Path, name: str, text: str, content: dict[str, Any]) -> dict[str, Any]:
    """Write a file; its entry of the manifest."""
    data = text.encode()
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(data)
    return {"path": name, "bytes": len(data), "sha256": _digest(data), **content}


@dataclass(frozen=True)
class Checked(Described):
    """The files of a data set against its manifest.

    digest    SHA-256 of the manifest, which stands for the whole data set.
    problems  what is missing, changed or not listed, in words.
    """

    digest: str
    files: int
    problems: list[str]

    @property
    def ok(self) -> bool:
        """Whether each file is as the manifest says, and no other is there."""
        return not self.problems

    @property
    def message(self) -> str:
        """The problems, and the digest."""
        count = f"{self.files} files, {len(self.problems)} problems"
        return "\n".join([*self.problems, f"{count}; {MANIFEST} {self.digest}"])

    def to_dict(self) -> dict[str, Any]:
        """The fields."""
        return {"ok": self.ok} | vars(self)


def check(folder: Path) -> Checked:
    """Compare the files of a folder with the sizes and checksums of its manifest.

    Raises:   OSError, ValueError: no manifest, or none of this schema.
    """
    path, problems, names = folder / MANIFEST, [], {MANIFEST}
    try:
        manifest = files.read_object(path)
        schema, listed = manifest["schema"], manifest["files"]
        require(schema == SCHEMA, f"it is of schema {schema!r}; this fp8ref reads {SCHEMA}")
        for entry in listed:
            name, parts = entry["path"], PurePosixPath(entry["path"]).parts
            require(".." not in parts and parts[0] != "/", f"{name!r} is outside of the folder")
            names.add(name)
            data = files.read_bytes(folder / name) if (folder / name).is_file() else None
            if data is None:
                problems.append(f"{name} is missing")
            elif (len(data), _digest(data)) != (entry["bytes"], entry["sha256"]):
                problems.append(f"{name} was changed: {len(data):,} bytes, {_digest(data)}")
    except (AttributeError, IndexError, OSError, TypeError, ValueError) as error:
        text = f"{path} is no manifest of a data set: {error}."
        raise ValueError(f"{text} Write one with fp8ref vectors dataset.") from error
    there = {p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()}
    problems += [f"{name} is not listed" for name in sorted(there - names)]
    return Checked(_digest(path.read_bytes()), len(listed), problems)


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
