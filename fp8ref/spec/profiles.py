"""Profiles as data: what a library, in a range of versions, does, in the specification's names.

docs/spec/profiles.md states them and differences. ``policy_profiles``: libraries of a policy.
"""

from dataclasses import KW_ONLY, dataclass
from typing import Literal

from fp8ref.shared import package_data, registry

Known = Literal["run", "transcribed", "read"]
"""How a profile is known.

run          the library, called by the tests or by docs/scripts/libraries.py.
transcribed  its steps, written again (``conformance.transcriptions``, or tests), and compared.
read         its source alone.
"""


@dataclass(frozen=True)
class Profile:
    """One library in one range of versions.

    policies  names of POLICIES or FP4_POLICIES; granularities: names of GRANULARITIES.
    cast      a behavior of C-8, after a clip where ``clipped``; None: not stated.
    bits      of the formats that tensors are cast to: 8 or 4.
    sources   of each: repository, file and commit, or package, version and file.
    """

    name: str
    versions: str
    policies: tuple[str, ...] = ()
    granularities: tuple[str, ...] = ()
    _: KW_ONLY
    library: str
    known: Known
    cast: str | None = None
    clipped: bool = False
    bits: int = 8
    sources: tuple[str, ...]


PROFILES = {
    name: Profile(name=name, **fields)
    for name, fields in package_data.tables(__file__, "profiles").items()
}
"""The profiles of profiles.toml by name, in the order of docs/spec/profiles.md."""


def by_name(profile: "str | Profile") -> Profile:
    """The profile of that name; a Profile is itself; ValueError for anything else."""
    return registry.lookup("profile is a Profile or", PROFILES, profile, Profile)


def policy_profiles(policy: str, bits: int = 8) -> list[str]:
    """The names of the profiles that have a policy for formats of so many bits; empty if none has.

    >>> policy_profiles("te_mxfp8_2.13"), policy_profiles("mx_floor", 4)
    (['te-mxfp8-2.13'], ['torchao-mxfp4'])
    """
    return [
        name
        for name, profile in PROFILES.items()
        if policy in profile.policies and profile.bits == bits
    ]
