"""The quickstart notebook runs from top to bottom and stores the output of every cell."""

import json
import pathlib

import jax
import matplotlib
import pytest

NOTEBOOK = pathlib.Path(__file__).parent.parent / "examples" / "quickstart.ipynb"
CELLS = [cell for cell in json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == "code"]


@pytest.fixture
def _quick_compilation():
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.mark.usefixtures("_quick_compilation")
def test_quickstart_notebook_runs(capsys):
    matplotlib.use("Agg")
    namespace = {"__name__": "quickstart"}
    for number, cell in enumerate(CELLS):
        exec(compile("".join(cell["source"]), f"{NOTEBOOK.name}, code cell {number}", "exec"), namespace)
    assert jax.device_count() == 8
    printed = capsys.readouterr().out
    assert "dq: one device" in printed and "8 devices" in printed


def test_quickstart_notebook_shows_its_results():
    outputs = [cell["outputs"] for cell in CELLS]
    assert all(outputs), "run the notebook before committing it"
    assert any("image/png" in output.get("data", {}) for cell in outputs for output in cell)
    assert not any(output["output_type"] == "error" for cell in outputs for output in cell)
