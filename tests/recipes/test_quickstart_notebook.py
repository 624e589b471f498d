"""The quickstart notebook: its cells run from top to bottom, find planted labels, and end with a better model."""

import ast
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from recipe_runs import ROOT

NOTEBOOK = ROOT / "recipes" / "quickstart.ipynb"


def code_cells() -> list[str]:
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]


def run_cell(source: str, namespace: dict[str, Any]) -> Any:
    """Run a cell, and return what a notebook would show below it."""
    body = ast.parse(source).body
    last = body.pop() if isinstance(body[-1], ast.Expr) else None
    exec(compile(ast.Module(body, []), str(NOTEBOOK), "exec"), namespace)
    return None if last is None else eval(compile(ast.Expression(last.value), str(NOTEBOOK), "eval"), namespace)


@pytest.mark.slow
def test_wrong_labels_are_found_and_the_next_model_is_better(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, Any] = {"__name__": "__main__"}
    shown = [run_cell(source, namespace) for source in code_cells()]
    planted, doubted, right = (namespace[name] for name in ("planted", "doubted", "right"))
    found = namespace["found"]
    assert planted.sum() == 20 and found.sum() > 0.6 * 20 and len(doubted) < 1.5 * found.sum()
    suggested = np.array(namespace["table"]["suggested_label"])
    assert np.mean(suggested[found] == np.array(right["label"])[found]) > 0.8
    assert namespace["after"] > namespace["before"] > 0.8
    pages = [one._repr_html_() for one in shown if hasattr(one, "_repr_html_")]
    assert len(pages) == 3 and sum("&lt;image" in page for page in pages) == 2
    assert str(doubted[0]["label"]) in pages[2] and "harmed" in pages[2].lower()
    assert f"{found.sum()} of the 20 that were planted" in capsys.readouterr().out
    namespace["directory"].cleanup()
    assert not list(tmp_path.iterdir())


def test_nothing_that_the_notebook_shows_is_stored() -> None:
    """Outputs would make every run a change of the file."""
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    assert all(not cell["outputs"] and cell["execution_count"] is None for cell in cells if "outputs" in cell)
