"""The table of architectures: what a new release of transformers changes, and that the pages say what is stored."""

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from transformers.models.auto import modeling_auto

ROOT = Path(__file__).parents[2]
MODULES = ("architectures", "architectures_configs", "architectures_curvature", "architectures_heads",
           "architectures_table")  # fmt: skip


@pytest.fixture(scope="module")
def command() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "benchmarks"))
        before = {name: sys.modules.pop(name) for name in MODULES if name in sys.modules}
        import architectures

        yield architectures
        for name in MODULES:
            sys.modules.pop(name, None)
        sys.modules.update(before)


@pytest.fixture(scope="module")
def table(command: ModuleType) -> ModuleType:
    return sys.modules["architectures_table"]


def row(engine: str, error: float | None = 1e-7, note: str = "") -> dict[str, Any]:
    return {"head": "causal-lm", "architecture": "any", "engine": engine, "error": error, "note": note}


def test_changes(table: ModuleType) -> None:
    """Every kind of difference, and nothing where only a rounding error differs."""
    names = ("same", "slower", "broken", "gone", "mended", "wrong")
    built = {name: row("hooked") for name in names if name != "mended"}
    stored = {("head", name): found for name, found in {**built, "mended": row("not built", None, "no")}.items()}
    later = {
        "same": row("hooked", 3e-7), "slower": row("iterative"), "broken": row("none", None, "cannot"),
        "mended": row("hooked"), "wrong": row("hooked", 0.3), "new": row("functional"),
        "nan": row("hooked", float("nan")),
    }  # fmt: skip
    found = table.changes(stored, {("head", name): value for name, value in later.items()})
    assert found.wrong == [
        "head nan: relative error nan with the engine hooked",
        "head wrong: relative error 0.3 with the engine hooked",
    ]
    assert found.broken == ["head broken: none (cannot), was hooked"]
    assert found.engines == ["head slower: iterative, was hooked"]
    assert found.new == ["head nan: hooked", "head new: functional"]
    assert found.gone == ["head gone"]
    assert found.mended == ["head mended: hooked, was not built (no)"]
    assert found.bad
    assert not table.changes(stored, {key: value for key, value in stored.items() if "gone" not in key}).bad


@pytest.mark.slow
def test_command_compares(
    command: ModuleType, table: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """Nothing differs from what is stored; with another stored engine, that is said."""
    arguments = ["architectures.py", "--only", "gpt2", "--heads", "causal-lm", "--compare"]
    monkeypatch.setattr(sys, "argv", arguments)
    assert command.main() == 0
    assert "engines: 0" in capsys.readouterr().out
    rows = table.read(table.STORED)
    rows["causal-lm", "gpt2"]["engine"] = "functional"
    table.write(tmp_path / "stored.jsonl", rows)
    monkeypatch.setattr(command, "STORED", tmp_path / "stored.jsonl")
    assert command.main() == 0
    assert "causal-lm gpt2: hooked, was functional" in capsys.readouterr().out
    monkeypatch.setattr(command, "relative_error", lambda *_: 0.5)
    assert command.main() == 1
    assert "wrong: 1" in capsys.readouterr().out


def test_nothing_stored_is_wrong(table: ModuleType) -> None:
    rows = table.read(table.STORED)
    # Here autograd of a sample alone is wrong in torch: finite differences agree with the engine, and with a batch.
    assert [key for key, found in rows.items() if table.is_wrong(found)] == [("image-classification", "cvt")]
    engines = {"hooked", "functional", "iterative"}
    assert all((found["engine"] in engines) == (found["error"] is not None) for found in rows.values())


def test_pages_say_what_is_stored(command: ModuleType, table: ModuleType) -> None:
    rows = table.read(table.STORED)
    page = (ROOT / "benchmarks" / "pages" / "architectures.md").read_text(encoding="utf-8")
    classes = {name: head.auto for name, head in command.HEADS.items()}
    assert table.summary(rows, classes) in page
    tried = [found for found in rows.values() if found["error"] is not None]
    hooked = sum(found["engine"] == "hooked" for found in tried)
    readme = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    assert f"lists {len(rows):,} architectures" in readme and f"build {len(tried):,} of them" in readme
    assert f"fast engine for {hooked:,}" in readme


@pytest.mark.slow
def test_page_names_every_class(command: ModuleType) -> None:
    """Those of the installed transformers, tried or not."""
    page = (ROOT / "benchmarks" / "pages" / "architectures.md").read_text(encoding="utf-8")
    classes = {name for name in dir(modeling_auto) if name.startswith("AutoModelFor")}
    assert classes - {head.auto for head in command.HEADS.values()} <= set(command.not_tried())
    assert not [name for name in sorted(classes) if f"`{name}`" not in page]
