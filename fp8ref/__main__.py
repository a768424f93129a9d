"""``python -m fp8ref`` is the ``fp8ref`` command."""

import sys

from fp8ref.cli import main

sys.exit(main())
