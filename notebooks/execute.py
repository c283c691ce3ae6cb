"""Executes notebooks: `python notebooks/execute.py [NN ...]` writes NN_title.ipynb beside its .py.

The .py file (jupytext, percent format) is the source; outputs live in the .ipynb alone.
"""

import sys
from pathlib import Path

import jupytext
import nbformat
from nbclient import NotebookClient

FOLDER = Path(__file__).parent
SECONDS_A_CELL = 300  # on a busy machine; a whole notebook takes less than 60 on an idle one


def sources() -> list[Path]:
    """The notebooks' .py files, in order."""
    return sorted(FOLDER.glob("[0-9][0-9]_*.py"))


def cells(notebook: nbformat.NotebookNode) -> list[tuple[str, str]]:
    """Type and source of every cell."""
    return [(cell.cell_type, cell.source.strip()) for cell in notebook.cells]


def execute(source: Path) -> nbformat.NotebookNode:
    """The notebook of a .py file with its outputs, run top to bottom in a kernel of its own.

    Raises:
        nbclient.exceptions.CellExecutionError: a cell failed.
    """
    notebook = jupytext.read(source)
    for i, cell in enumerate(notebook.cells):
        cell.id = f"cell-{i}"  # random ids would change with every run
    client = NotebookClient(
        notebook,
        timeout=SECONDS_A_CELL,
        kernel_name="python3",
        resources={"metadata": {"path": source.parent}},
        record_timing=False,
    )
    return client.execute()


def main(numbers: list[str]) -> None:
    """Execute and write these notebooks, or all."""
    for source in sources():
        if not numbers or source.name[:2] in numbers:
            notebook = execute(source)
            nbformat.write(notebook, source.with_suffix(".ipynb"))
            print(f"wrote {source.with_suffix('.ipynb').name}")


if __name__ == "__main__":
    main(sys.argv[1:])
