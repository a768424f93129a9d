"""The planted faults fit the package as it is, and a fault that lives or dies is told as that."""

from pathlib import Path

import pytest
from faults import plant

FAULTS = plant.read()


def test_there_are_enough_and_nearly_all_are_expected_to_die():
    real = [f for f in FAULTS if not f.equivalent]
    assert len(real) >= 100
    assert sum(f.expected_to_die for f in real) >= 0.95 * len(real)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f"{Path(f.file).stem}: {f.name}")
def test_each_fits_the_package(fault):
    source = fault.planted((plant.ROOT / fault.file).read_text())
    compile(source, fault.file, "exec")
    for test in fault.test_files():
        assert (plant.ROOT / test.split("::")[0]).exists(), test


def test_rooms_have_faults():
    rooms = {Path(f.file).parts[1] for f in FAULTS}
    assert {
        "sim",
        "jax",
        "torch",
        "train",
        "conformance",
        "crosscheck",
        "estimate",
        "study",
    } <= rooms


MAXIMUM = "def largest(values):\n    return max(values)\n"
TEST = "from fp8ref.small import largest\n\ndef test_largest():\n    assert largest([1, 2]) == 2\n"


@pytest.fixture
def tree(tmp_path, monkeypatch):
    """A package of one function, with a test that holds it, twice: the original and a copy."""
    for name in ("original", "copy"):
        (tmp_path / name / "fp8ref").mkdir(parents=True)
        (tmp_path / name / "tests").mkdir()
        (tmp_path / name / "fp8ref" / "__init__.py").touch()
        (tmp_path / name / "fp8ref" / "small.py").write_text(MAXIMUM)
        (tmp_path / name / "tests" / "test_small.py").write_text(TEST)
        (tmp_path / name / "pytest.ini").write_text("[pytest]\nmarkers = slow\n exhaustive\n gpu\n")
    monkeypatch.setattr(plant, "ROOT", tmp_path / "original")
    monkeypatch.setenv("PYTEST_ADDOPTS", "-p no:fp8ref")  # whose package is not this small one
    return tmp_path / "copy"


def small(new, **entry):
    old = "max(values)"
    return plant.Fault(name="small", file="fp8ref/small.py", old=old, new=new, **entry)


def test_a_fault_dies_or_survives(tree):
    killed, survived, other = plant.outcomes(
        [small("min(values)"), small("sorted(values)[-1]"), small("sum(values) - 1")], [tree]
    )
    assert (killed.killed, killed.problem) == (True, "")
    assert "test_largest" in killed.line()
    assert not survived.killed
    assert not survived.problem
    assert plant.share([killed, survived]) == 0.5
    assert "survives: fp8ref/small.py: small: passes tests/test_small.py" in plant.summary(
        [survived]
    )
    assert not other.killed
    assert plant.summary([killed, survived]).startswith("1 of 2 planted faults")
    assert (tree / "fp8ref" / "small.py").read_text() == MAXIMUM


def test_entries_that_are_wrong_about_their_fate(tree):
    wrong, right = plant.outcomes(
        [small("min(values)", equivalent="?"), small("sorted(values)[-1]", equivalent="same")],
        [tree],
    )
    assert "is called equivalent" in wrong.problem
    assert not right.problem
    assert "equivalent: fp8ref/small.py: small: same" in plant.summary([right])


def test_a_fault_that_nothing_can_judge_is_a_problem(tree):
    (outcome,) = plant.outcomes([small("max(values", tests=("tests/test_none.py",))], [tree])
    assert "judged nothing" in outcome.problem


def test_a_text_that_is_gone_is_named():
    with pytest.raises(ValueError, match=r"occurs once in fp8ref/small\.py; it occurs 0 times"):
        small("min(values)").planted("")
