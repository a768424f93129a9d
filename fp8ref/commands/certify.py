"""fp8ref certify: compare casts and scales of installed libraries with the simulator."""

import argparse

from fp8ref.commands import shared
from fp8ref.commands.shared import check_json, conclude


def add(commands) -> None:
    """Add ``fp8ref certify``."""
    certificate = shared.plain(
        commands,
        "certify",
        _certify,
        "Compare casts and scales of the installed libraries with the simulator.",
        "Compare casts and scales of torch, jax, ml_dtypes, torchao and fp8ref's own backends "
        "with the simulator.",
    )
    certificate.add_argument(
        "--exhaustive",
        action="store_true",
        help="compare all 2^32 inputs of each cast and all 2^31 amaxes (minutes)",
    )
    shared.add_json(certificate, "write every comparison to FILE")


def _certify(arguments: argparse.Namespace) -> int:
    check_json(arguments.json)
    from fp8ref.conformance.certify import certify

    return conclude(certify(exhaustive=arguments.exhaustive), arguments.json)
