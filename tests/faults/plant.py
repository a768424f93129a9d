"""Plant small faults in the package, one at a time, and list those that the fast tests do not see.

    python tests/faults/plant.py                      # all of them
    python tests/faults/plant.py --match crosscheck   # those whose file or name contains this
    python tests/faults/plant.py --every 16 --turn 3  # one in sixteen

A test suite that passes shows little until something wrong fails it. Each entry of a .toml file
beside this one replaces a text that occurs once in one file of the package:

    [[fault]]
    name = "initial weights are compared with themselves"
    file = "fp8ref/crosscheck/one_device.py"
    old = "backend: mine[name]}"
    new = "backend: value}"
    tests = ["tests/crosscheck/test_one_device.py"]   # default: the test file that mirrors ``file``

An ``equivalent`` entry gives the reason why no test can tell the fault from the original. A
``survives`` entry gives the reason why the fast tests do not see it, although a test could.
"""

import argparse
import concurrent.futures
import dataclasses
import itertools
import os
import queue
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
FAST = "not slow and not exhaustive and not gpu"
TIMEOUT_S = 900  # a fault may make a test wait forever
FAILED, NO_FAILURE = 1, 0  # pytest's exit codes
_SECONDS = itertools.count(1)


@dataclasses.dataclass(frozen=True)
class Fault:
    """One replacement in one file, and the tests that should see it."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...] = ()
    equivalent: str = ""
    survives: str = ""

    @property
    def expected_to_die(self) -> bool:
        return not (self.equivalent or self.survives)

    def test_files(self) -> tuple[str, ...]:
        """The named tests, or the file that mirrors the source."""
        if self.tests:
            return self.tests
        path = Path(self.file).relative_to("fp8ref")
        return (str(Path("tests") / path.parent / f"test_{path.name}"),)

    def planted(self, source: str) -> str:
        """The source with the fault.

        Raises: ValueError: the old text is not there exactly once, or nothing would change.
        """
        count = source.count(self.old)
        if count != 1 or self.old == self.new:
            raise ValueError(
                f"fault {self.name!r} needs a text that occurs once in {self.file}; it occurs "
                f"{count} times: {self.old!r}. Update the entry in {HERE.name}/."
            )
        return source.replace(self.old, self.new)


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What the tests said of a planted fault."""

    fault: Fault
    exit_code: int
    seconds: float
    output: str

    @property
    def killed(self) -> bool:
        return self.exit_code == FAILED

    @property
    def problem(self) -> str:
        """Why this outcome contradicts the entry; empty if it does not."""
        if self.exit_code not in (FAILED, NO_FAILURE):
            return f"pytest ended with {self.exit_code}, and judged nothing:\n{self.output[-2000:]}"
        if self.killed and self.fault.equivalent:
            return "is called equivalent, and a test fails"
        if self.killed and self.fault.survives:
            return "is said to survive, and a test fails: remove 'survives'"
        return ""

    def line(self) -> str:
        fate = "killed" if self.killed else "equivalent" if self.fault.equivalent else "survived"
        failed = [x for x in self.output.splitlines() if x.startswith(("FAILED ", "ERROR "))]
        by = failed[0].split(" - ")[0].split("::", 1)[-1] if self.killed and failed else ""
        return f"{fate:10} {self.seconds:6.1f} s  {self.fault.file}: {self.fault.name}  {by}"


def read(folder: Path = HERE) -> list[Fault]:
    """All entries, file after file.

    Raises: TypeError: an unknown key. ValueError: two entries of one name.
    """
    faults: list[Fault] = []
    for path in sorted(folder.glob("*.toml")):
        entries = tomllib.loads(path.read_text())["fault"]
        faults += [Fault(**entry | {"tests": tuple(entry.get("tests", ()))}) for entry in entries]
    names = [(f.file, f.name) for f in faults]
    if len(names) != len(set(names)):
        raise ValueError(f"two faults have one name: {max(names, key=names.count)}")
    return faults


def copy_tree(tree: Path) -> None:
    """Make ``tree`` a copy of what git tracks or would track, with times of change as they are."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, tree / name)


def run_tests(tree: Path, tests: Sequence[str], *options: str) -> tuple[int, str]:
    """Run fast tests in a tree: pytest's exit code and what it printed. A run that hangs failed."""
    environment = {"OMP_NUM_THREADS": "1"} | os.environ | {"PYTHONPATH": str(tree)}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", FAST]
    try:
        ended = subprocess.run(
            [*command, *options, *tests],
            cwd=tree,
            env=environment,
            timeout=TIMEOUT_S,
            capture_output=True,
            text=True,
        )
    except subprocess.TimeoutExpired:
        return FAILED, f"FAILED ::no end within {TIMEOUT_S} s"
    return ended.returncode, ended.stdout + ended.stderr


def plant(fault: Fault, tree: Path) -> Outcome:
    """Plant one fault in a tree, run its tests, and put the original back."""
    path, original = tree / fault.file, ROOT / fault.file
    path.write_text(fault.planted(original.read_text()))
    # Python believes a compiled file whose source has its size and time of change, in seconds.
    later = original.stat().st_mtime + next(_SECONDS)
    os.utime(path, (later, later))
    start = time.monotonic()
    try:
        code, output = run_tests(tree, fault.test_files(), "-x")
    finally:
        shutil.copy2(original, path)
    return Outcome(fault, code, time.monotonic() - start, output)


def outcomes(faults: Sequence[Fault], trees: Sequence[Path]) -> Iterator[Outcome]:
    """Plant all faults, one at a time in each tree."""
    free: queue.Queue[Path] = queue.Queue()
    for tree in trees:
        free.put(tree)

    def planted(fault: Fault) -> Outcome:
        tree = free.get()
        try:
            return plant(fault, tree)
        finally:
            free.put(tree)

    with concurrent.futures.ThreadPoolExecutor(len(trees)) as pool:
        yield from pool.map(planted, faults)


def share(results: Sequence[Outcome]) -> float:
    """The share that died, of those that a test can tell from the original; 1 of none."""
    real = [r for r in results if not r.fault.equivalent]
    return sum(r.killed for r in real) / len(real) if real else 1.0


def summary(results: Sequence[Outcome]) -> str:
    """How many died, and what did not: why, or whose tests passed."""
    real = [r for r in results if not r.fault.equivalent]
    killed = sum(r.killed for r in real)
    lines = [
        f"{killed} of {len(real)} planted faults were seen by the fast tests "
        f"({share(results):.1%})."
    ]
    for r in results:
        where = f"{r.fault.file}: {r.fault.name}"
        if r.fault.equivalent:
            lines.append(f"equivalent: {where}: {r.fault.equivalent}")
        elif not r.killed and not r.problem:
            reason = r.fault.survives or f"passes {' '.join(r.fault.test_files())}"
            lines.append(f"survives: {where}: {reason}")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--match", default="", help="faults whose file or name contains this")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="one fault in N")
    parser.add_argument("--turn", type=int, default=0, metavar="K", help="begin with the K-th")
    parser.add_argument("--jobs", type=int, default=2, help="faults planted at a time")
    parser.add_argument("--least", type=float, default=0.95, help="the share that must die")
    options = parser.parse_args(arguments)
    faults = [f for f in read() if options.match in f"{f.file} {f.name}"]
    faults = faults[options.turn % options.every :: options.every]
    if not faults:
        parser.error(f"no fault matches {options.match!r}")
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        trees = [Path(folder) / str(i) for i in range(min(options.jobs, len(faults)))]
        for tree in trees:
            copy_tree(tree)
        if options.every == 1:  # a slice belongs to a run of the whole suite, which shows it
            tests = sorted({test for f in faults for test in f.test_files()})
            code, output = run_tests(trees[0], tests)
            if code != NO_FAILURE:
                print(output[-4000:], "\nThe tests fail without a fault.", sep="")
                return 1
        results, problems = [], []
        for outcome in outcomes(faults, trees):
            results.append(outcome)
            print(outcome.line(), flush=True)
            if outcome.problem:
                problems.append(f"{outcome.fault.file}: {outcome.fault.name}: {outcome.problem}")
    print(summary(results))
    for problem in problems:
        print(problem)
    return 1 if problems or share(results) < options.least else 0


if __name__ == "__main__":
    sys.exit(main())
