"""Execute notebooks in their own directory, and write them with their outputs.

python notebooks/execute.py NOTEBOOK...
"""

import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient


def execute(path: Path) -> None:
    """Replace a notebook's outputs by those of a fresh kernel.

    Raises:   CellExecutionError: a cell failed; the file is left as it was.
    """
    notebook = nbformat.read(path, as_version=4)
    # times of execution would change the file whenever it is executed
    NotebookClient(
        notebook,
        timeout=600,
        record_timing=False,
        coalesce_streams=True,
        resources={"metadata": {"path": str(path.parent)}},
    ).execute()
    notebook.metadata = {"kernelspec": notebook.metadata["kernelspec"]}
    nbformat.validate(notebook)
    nbformat.write(notebook, path)


if __name__ == "__main__":
    for name in sys.argv[1:]:
        execute(Path(name))
