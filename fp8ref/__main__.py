"""``python -m fp8ref`` is the ``fp8ref`` command."""

from fp8ref.cli import run

run()
