"""The layers of the library: what `lint-imports` checks in CI, and that it would notice an import that breaks them."""

import ast
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = sorted(path.parent for path in (ROOT / "hf_trak").rglob("__init__.py"))


def lint(directory: Path) -> subprocess.CompletedProcess[str]:
    """Run `lint-imports` on the copy of the library in a directory."""
    pytest.importorskip("importlinter")
    code = "import sys; sys.path.insert(0, '.'); from importlinter.cli import lint_imports; sys.exit(lint_imports())"
    return subprocess.run([sys.executable, "-c", code], cwd=directory, capture_output=True, text=True, timeout=120)


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A copy of the library and its contracts."""
    shutil.copytree(ROOT / "hf_trak", tmp_path / "hf_trak", ignore=shutil.ignore_patterns("__pycache__", "*.cu"))
    shutil.copy(ROOT / ".importlinter", tmp_path)
    return tmp_path


def test_the_layers_hold(copy: Path) -> None:
    found = lint(copy)
    assert found.returncode == 0, found.stdout + found.stderr


@pytest.mark.parametrize(
    "module, line, contract",
    [
        ("store/atomic.py", "from hf_trak.scores.ridge import ridge_lambda", "Packages import only"),
        ("projectors/base.py", "import transformers", "Projectors and kernels know no models"),
        ("gradient_computers/base.py", "from hf_trak.store import atomic", "Gradient computers know no files"),
        ("scores/ridge.py", "def late():\n    from hf_trak.cli import main", "Packages import only"),
        ("scores/gram.py", "if TYPE_CHECKING:\n    from hf_trak.scores.streaming import joined", None),
        (
            "scores/ridge.py",
            "if TYPE_CHECKING:\n    from hf_trak.scores.streaming import joined",
            "No two modules, and no two packages",
        ),
    ],
)
def test_a_planted_import_is_noticed(copy: Path, module: str, line: str, contract: str | None) -> None:
    path = copy / "hf_trak" / module
    path.write_text(path.read_text() + f"\nfrom typing import TYPE_CHECKING\n{line}\n")
    found = lint(copy)
    if contract is None:  # an import that is allowed
        assert found.returncode == 0, found.stdout
        return
    assert found.returncode != 0
    broken = [text for text in found.stdout.splitlines() if text.endswith("BROKEN")]
    assert any(text.startswith(contract) for text in broken), found.stdout


@pytest.mark.parametrize("package", PACKAGES, ids=lambda path: path.name)
def test_every_package_says_what_lives_there(package: Path) -> None:
    text = ast.get_docstring(ast.parse((package / "__init__.py").read_text(encoding="utf-8")))
    assert text is not None
    assert len(text.splitlines()) <= 15


def test_importing_the_library_loads_nothing_heavy() -> None:
    """Public names are imported when they are first used."""
    code = "import sys, hf_trak; print([name for name in ('torch', 'transformers', 'numpy') if name in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert found.stdout.strip() == "[]", found.stdout + found.stderr


OPTIONAL = {
    "PIL", "bitsandbytes", "deepspeed", "diffusers", "faiss", "gradio", "kernels", "matplotlib", "open_clip",
    "peft", "pyspark", "ray", "scipy", "sentence_transformers", "sklearn", "timm", "torchvision", "trl",
}  # fmt: skip
"""Packages that an installation without extras need not have."""


@pytest.mark.slow
def test_a_plain_installation_needs_no_optional_package() -> None:
    """No module that `hf_trak`, its attributor and its command line load imports one of these at its top."""
    code = (
        "import sys, hf_trak, hf_trak.cli.main, hf_trak.featurize.exact, hf_trak.featurize.reranking;"
        "hf_trak.TrakAttributor; print(*(m.__file__ for n, m in list(sys.modules.items()) "
        "if n.partition('.')[0] == 'hf_trak' and getattr(m, '__file__', None))); print(*sys.modules, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = done.stdout.split()
    assert len(loaded) > 100
    # Importing the models of transformers takes seconds: who has one has imported them.
    assert "transformers.modeling_utils" not in done.stderr.split()
    wrong = []
    for file in loaded:
        for statement in ast.parse(Path(file).read_text(encoding="utf-8")).body:
            names = [one.name for one in statement.names] if isinstance(statement, ast.Import) else []
            names += [statement.module or ""] if isinstance(statement, ast.ImportFrom) else []
            wrong += [f"{file}: {name}" for name in names if name.partition(".")[0] in OPTIONAL]
    assert not wrong
