"""Every notebook runs top to bottom, and the committed .ipynb is what its .py says."""

import shutil
from pathlib import Path

import pytest

pytestmark = pytest.mark.notebook
FOLDER = Path(__file__).parents[2] / "notebooks"
NAMES = sorted(path.stem for path in FOLDER.glob("[0-9][0-9]_*.py"))
MOST_BYTES = 300_000


@pytest.fixture(scope="module")
def nbformat():
    return pytest.importorskip("nbformat", reason="needs the extra `notebooks`")


@pytest.fixture(scope="module")
def execute():
    pytest.importorskip("nbclient", reason="needs the extra `notebooks`")
    from notebooks import execute

    return execute


def test_there_are_nine():
    assert [name[:2] for name in NAMES] == [f"{i:02}" for i in range(1, 10)]
    assert {path.stem for path in FOLDER.glob("*.ipynb")} == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_pair(name, nbformat, execute):
    import jupytext

    file = FOLDER / f"{name}.ipynb"
    assert file.stat().st_size < MOST_BYTES
    kept = nbformat.read(file, as_version=4)
    nbformat.validate(kept)
    assert execute.cells(kept) == execute.cells(jupytext.read(FOLDER / f"{name}.py"))
    outputs = [output for cell in kept.cells for output in cell.get("outputs", ())]
    assert not [output for output in outputs if output.output_type == "error"]
    assert any(kind.startswith("image/") for output in outputs for kind in output.get("data", ()))


@pytest.mark.filterwarnings("default")  # of the kernel's libraries
@pytest.mark.parametrize("name", NAMES)
def test_runs(name, execute, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(FOLDER.parent))
    monkeypatch.delenv("XLA_FLAGS", raising=False)  # one device, as for a reader
    copy = shutil.copy(FOLDER / f"{name}.py", tmp_path)
    done = execute.execute(Path(copy))
    assert all(cell.execution_count for cell in done.cells if cell.cell_type == "code")
    assert any(cell.outputs for cell in done.cells if cell.cell_type == "code")
