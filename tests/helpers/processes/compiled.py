"""The script that prints what every way of compiling a model gives, as a module; and what refusals
say, dynamo's own about them too.
"""

import importlib.util
from pathlib import Path

from torch._dynamo.exc import TorchDynamoException

SCRIPT = Path(__file__).parents[3] / "benchmarks" / "compiled" / "compile_matrix.py"
_spec = importlib.util.spec_from_file_location("compile_matrix", SCRIPT)
matrix = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(matrix)


def said(function, *args, **options):
    """The message of the ValueError, or of dynamo's about it."""
    try:
        function(*args, **options)
    except (ValueError, TorchDynamoException) as error:
        return str(error)
    return ""
