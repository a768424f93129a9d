"""Build the sdist and the wheel, check them, and use the wheel where there is no clone: python
tests/install/release.py [--full]

Both are left in dist/. The wheel is installed into a new environment of every Python of PYTHONS
that is on the path, and used there: without extras; with --full, and under the first of them, also
with [all], where both backends train and `fp8ref demo` runs. On a package index the README has no
files next to it: links to files become links to pyproject.toml's Source address, or plain text as
long as it names none.
"""

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
import venv
from pathlib import Path

from extras import ROOT, SIMULATOR, SOME, TINY, Use, used

PYTHONS = ("python3.11", "python3.12", "python3.13")
TOOLS = ("build>=1.2", "twine>=6")
_LINK = re.compile(r"(?P<image>!?)\[(?P<text>(?:[^\]\\]|\\.)*)\]\((?P<file>(?!https?:|#)[^)]+)\)")
BARE = [
    Use("the simulator", code=SIMULATOR),
    Use("fp8ref --version", ("--version",), says="fp8ref "),
    Use(
        "the packaged configs and tensors",
        code="from fp8ref import configs; assert configs.find('tiny').exists() and "
        "configs.find('tiny', '.npz').exists()",
    ),
    Use(
        "types",
        code="import fp8ref, pathlib; assert (pathlib.Path(fp8ref.__file__).parent / "
        "'py.typed').exists()",
    ),
    Use("vectors gen", ("vectors", "gen", "cast", "--format", "e4m3fn", "--count", "1")),
    Use("train names [train]", ("train", TINY, "--backend", "jax"), exit=2, says="fp8ref[train]"),
]
FULL = [
    Use("train with jax", ("train", TINY, "--backend", "jax", *SOME), says="loss"),
    Use(
        "train with torch", ("train", TINY, "--backend", "torch", *SOME, "--overwrite"), says="loss"
    ),
    Use(
        "the tensors", code="from fp8ref.train import tensors; assert tensors.read('tiny').operands"
    ),
    Use("demo", ("demo",), says="largest gap between FP8 and bf16"),
]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--full",
        action="store_true",
        help="also [all] under the first Python, and the demo there: minutes, gigabytes",
    )
    known = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        wheel = built(folder)
        found = [(name, path) for name in PYTHONS if (path := shutil.which(name)) and runs(path)]
        print(
            f"here are {', '.join(name for name, _ in found)}; not here: "
            f"{', '.join(set(PYTHONS) - {n for n, _ in found}) or 'none'}"
        )
        failed = sum(smoke(path, f"{wheel}", BARE, folder / name) for name, path in found)
        if known.full:
            failed += smoke(found[0][1], f"{wheel}[all]", FULL, folder / "full")
    print("the release is NOT as it should be" if failed else "the release is as it should be")
    return 1 if failed else 0


def runs(python: str) -> bool:
    """Whether it starts: a shim of pyenv may name a version that is not chosen."""
    return subprocess.run([python, "--version"], capture_output=True).returncode == 0


def built(folder: Path) -> Path:
    """sdist and wheel of the files that git tracks, in dist/, checked by twine; the wheel."""
    source, dist, tools = folder / "source", ROOT / "dist", folder / "tools"
    tracked = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split("\0")
    for name in tracked:
        if name and (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, source / name)
    project = tomllib.loads((source / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    readme = source / "README.md"
    readme.write_text(
        for_an_index(readme.read_text(encoding="utf-8"), project.get("urls", {}).get("Source")),
        encoding="utf-8",
    )
    venv.create(tools, with_pip=True)
    python = tools / "bin" / "python"
    subprocess.run(
        [python, "-m", "pip", "install", "-q", "--disable-pip-version-check", *TOOLS], check=True
    )
    shutil.rmtree(dist, ignore_errors=True)
    subprocess.run(
        [python, "-m", "build", "--outdir", dist, source], check=True, stdout=subprocess.DEVNULL
    )
    subprocess.run([python, "-m", "twine", "check", "--strict", *dist.iterdir()], check=True)
    return next(dist.glob("*.whl"))


def for_an_index(readme: str, source: str | None) -> str:
    """A README whose links to files lead to ``source``, the address of the repository; without one,
    their text alone.
    """

    def absolute(found: re.Match) -> str:
        if source is None:
            return "" if found["image"] else found["text"]
        return f"{found['image']}[{found['text']}]({source.rstrip('/')}/{'raw' if found['image'] else 'blob'}/main/{found['file']})"

    return _LINK.sub(absolute, readme)


def smoke(python: str, what: str, uses: list[Use], folder: Path) -> int:
    """Install the wheel into a new environment and use it there; how many uses went wrong."""
    subprocess.run([python, "-m", "venv", folder / "venv"], check=True)
    made = folder / "venv" / "bin" / "python"
    constraints = (
        ["-c", ROOT / "constraints.txt"]
        if sys.version_info[:2] == (3, 11) and python.endswith("3.11")
        else []
    )
    subprocess.run(
        [made, "-m", "pip", "install", "-q", "--disable-pip-version-check", *constraints, what],
        check=True,
    )
    (folder / "text").mkdir()
    for i in range(8):
        (folder / "text" / f"{i}.txt").write_text("fp8 amax scale bits\n" * 4000, encoding="utf-8")
    print(f"{Path(python).name}, {Path(what).name}", flush=True)
    return sum(not used(use, made, folder) for use in uses)


if __name__ == "__main__":
    sys.exit(main())
