"""Profiles are data in the names of the specification, and the page of profiles lists them."""

import importlib.util
import re
from pathlib import Path

import pytest

from fp8ref.conformance import identify_quantizer
from fp8ref.conformance.cast.behavior import KNOWN_CASTS
from fp8ref.conformance.libraries.transcriptions import TRANSCRIPTIONS
from fp8ref.formats import E4M3FN
from fp8ref.policy import FP4_POLICIES, POLICIES
from fp8ref.sim.quantize import scaling
from fp8ref.spec import profiles
from fp8ref.spec.granularity import GRANULARITIES
from fp8ref.spec.profiles import PROFILES

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "spec" / "profiles.md").read_text(encoding="utf-8")
OWN = {"torchao_mask"}
"""Policies of no library."""


def test_every_name_is_one_of_the_specification():
    for name, profile in PROFILES.items():
        assert name == profile.name
        assert set(profile.policies) <= set(POLICIES | FP4_POLICIES), name
        assert profile.bits == (4 if "fp4" in name else 8), name
        assert set(profile.granularities) <= set(GRANULARITIES), name
        assert profile.cast is None or profile.cast in KNOWN_CASTS, name
        assert profile.sources, name


def test_every_policy_is_of_a_profile():  # S-9, S-14, S-17, S-20
    assert {name for name in POLICIES if not profiles.policy_profiles(name)} == OWN
    assert all(profiles.policy_profiles(name, 4) for name in FP4_POLICIES)  # S-22


def test_the_page_lists_each_profile_with_its_policies():
    rows = dict(re.findall(r"^\| \[(`.*?`)\]\(#[a-z0-9_-]+\) \|(.*)\|$", PAGE, re.MULTILINE))
    listed = {
        name: cells for names, cells in rows.items() for name in re.findall(r"`(.*?)`", names)
    }
    assert list(listed) == list(PROFILES)
    for name, cells in listed.items():
        library, versions, known, cast, policies = (cell.strip() for cell in cells.split(" | "))
        profile = PROFILES[name]
        assert (library, versions, known) == (profile.library, profile.versions, profile.known), (
            name
        )
        assert re.findall(r"`(.*?)`", policies) == list(profile.policies), name
        assert cast == (
            f"`{profile.cast}`{', after a clip' * profile.clipped}"
            if profile.cast
            else "not stated"
        ), name


def test_what_is_transcribed_says_so():
    spec = importlib.util.spec_from_file_location("engines", DOCS / "scripts" / "engines.py")
    engines = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(engines)
    transcribed = {known.library for known in (*TRANSCRIPTIONS, *engines.ENGINES)}
    # HIP's casts are transcribed in tests/conformance/test_hip_header.py.
    assert {p.library for p in PROFILES.values() if p.known == "transcribed"} == transcribed | {
        "HIP"
    }


def test_by_name():
    assert profiles.by_name("te-mxfp8").versions == "before 2.13"
    with pytest.raises(ValueError, match=r"profile is a Profile or one of torchao-0\.18"):
        profiles.by_name("te")


def test_a_quantizer_that_is_identified_names_its_profiles():  # S-16
    found = identify_quantizer(
        lambda x: scaling.quantize(x, E4M3FN, granularity="mx_1x32", policy="te_mxfp8_2.13"), E4M3FN
    )
    assert found.found["profiles"] == ["te-mxfp8-2.13"]
