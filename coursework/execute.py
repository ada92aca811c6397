"""`python -m coursework execute`: run the course's notebooks from a restart and store what they print."""

from __future__ import annotations

from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbformat import NotebookNode

KERNEL = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"},
          "language_info": {"name": "python"}}


def execute(path: Path, timeout: int = 600) -> None:
    """Run one notebook in place. Timestamps are left out, so that running it again changes only what differs.

    Raises:
        nbclient.exceptions.CellExecutionError: a cell failed; the file stays as it was.
    """
    notebook = nbformat.read(path, as_version=4)
    NotebookClient(notebook, timeout=timeout, kernel_name="python3", record_timing=False,
                   resources={"metadata": {"path": str(path.parent)}}).execute()
    notebook.metadata = nbformat.from_dict(KERNEL)
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
        if cell.cell_type == "code":
            cell.outputs = _merged(cell.outputs)
    nbformat.write(notebook, path)


def _merged(outputs: list[NotebookNode]) -> list[NotebookNode]:
    """One message per stream, however the kernel happened to split what was printed."""
    merged: list[NotebookNode] = []
    for output in outputs:
        last = merged[-1] if merged else None
        if last is not None and output.output_type == last.output_type == "stream" and output.name == last.name:
            last.text += output.text
        else:
            merged.append(output)
    return merged
