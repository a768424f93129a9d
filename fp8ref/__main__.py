"""``python -m fp8ref`` is the ``fp8ref`` command.

As in the command, modules of the working directory are not found, unless it is on PYTHONPATH: a
file there could have the name of any library.
"""

import os
import sys

if not sys.flags.safe_path and sys.path[:1] == [os.getcwd()]:
    del sys.path[0]

from fp8ref.cli import run

run()
