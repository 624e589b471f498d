"""The package for the Hub's `kernels` library: it needs no hf_trak, gives the same bits, and loads from a folder."""

import base64
import hashlib
import importlib.util
import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_trak import projectors
from hf_trak.errors import KernelError
from hf_trak.kernels.sources import source

ROOT = Path(__file__).parents[2]
spec = importlib.util.spec_from_file_location("build_package", ROOT / "cuda_ext" / "hub" / "build_package.py")
assert spec is not None and spec.loader is not None
package = importlib.util.module_from_spec(spec)
spec.loader.exec_module(package)
REPO_ID = "somebody/random-projections"
PYTHON_NAME = "random_projections"
FUNCTIONS = ("sjlt", "rademacher", "normal")
kernels = importlib.util.find_spec("kernels")  # without an origin, it is the folder of these tests
needs_kernels = pytest.mark.skipif(kernels is None or kernels.origin is None, reason="needs the kernels package")

WITHOUT_HF_TRAK = """
import importlib.util, json, sys
from pathlib import Path
import torch

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "hf_trak":
            raise ImportError("hf_trak is not to be imported")

sys.meta_path.insert(0, Refuse())
folder, out = Path(sys.argv[1]), sys.argv[2]

def by_path():
    identifier = json.loads((folder / "metadata.json").read_text())["id"]
    spec = importlib.util.spec_from_file_location(identifier, folder / "__init__.py")
    module = sys.modules[identifier] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
"""
RESULTS = """
def results(package):
    torch.manual_seed(0)
    x, y = torch.randn(3, 9000), torch.randn(3, 37)
    found = {}
    for name in ("sjlt", "rademacher", "normal"):
        function, transposed = getattr(package, name), getattr(package, name + "_transposed")
        leaf = x.clone().requires_grad_()
        found[name] = function(leaf, 37, seed=5, model_id=2)
        found[name].square().sum().backward()
        found[name + " gradient"] = leaf.grad
        found[name + " transposed"] = transposed(y.half(), 9000, seed=5)
        found[name] = found[name].detach()
    found["sjlt of s nonzeros"] = package.sjlt(x.bfloat16(), 37, nonzeros=3)
    found["vmap"] = torch.func.vmap(lambda one: package.sjlt(one, 8))(x)
    return found
"""
AT_THE_END = """
torch.save(results(package), out)
assert not [name for name in sys.modules if name.split(".")[0] == "hf_trak"]
"""
namespace: dict[str, Any] = {"torch": torch}
exec(RESULTS, namespace)
results: Callable[[Any], dict[str, Tensor]] = namespace["results"]


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return package.write_package(tmp_path_factory.mktemp("made") / "package", REPO_ID)


def run(script: str, *arguments: object, **environment: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", script, *map(str, arguments)],
        env={**os.environ, "HF_HUB_OFFLINE": "1", **environment},
        capture_output=True,
        text=True,
        cwd="/",
    )
    assert done.returncode == 0, done.stderr


def check_results(path: Path) -> None:
    """Those of hf_trak itself, to the bit."""
    found, expected = torch.load(path, weights_only=True), results(projectors)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name
        assert float(tensor.abs().max()) > 0, name


@pytest.mark.slow
def test_same_bits_without_hf_trak(repository: Path, tmp_path: Path) -> None:
    script = WITHOUT_HF_TRAK + RESULTS + "package = by_path()\n" + AT_THE_END
    run(script, repository / "build" / "torch-cpu", tmp_path / "found.pt")
    check_results(tmp_path / "found.pt")


@needs_kernels
@pytest.mark.parametrize("backend", ["cpu", None])
def test_loaded_from_a_folder(repository: Path, tmp_path: Path, backend: str | None) -> None:
    """`get_local_kernel`, and `get_kernel` by the name on the Hub."""
    load = (
        f"from kernels import get_kernel, get_local_kernel\nbackend = {backend!r}\n"
        "package = get_local_kernel(folder, backend=backend)\n"
        f"assert get_kernel({REPO_ID!r}, version=0, backend=backend) is package\n"
        "compiled = torch.compile(package.sjlt, backend='aot_eager', fullgraph=True)\n"
        "assert torch.equal(compiled(torch.ones(2, 99), 8), package.sjlt(torch.ones(2, 99), 8))\n"
    )
    script = WITHOUT_HF_TRAK + RESULTS + load + AT_THE_END
    run(script, repository, tmp_path / "found.pt", LOCAL_KERNELS=f"{REPO_ID}={repository}")
    check_results(tmp_path / "found.pt")


@needs_kernels
def test_accepted_by_the_ecosystem(repository: Path) -> None:
    """What `kernels` reads of a package: the builder's file, names, digests."""
    from kernels._rust import Build, Digest, DigestAlgorithm, KernelName, Metadata

    assert len(Build.open(repository).general.backends) == 2
    for backend in package.BACKENDS:
        variant = repository / "build" / f"torch-{backend}"
        metadata = Metadata.read_from_file(variant / "metadata.json")
        assert metadata.name == KernelName(package.NAME) and metadata.version == package.VERSION
        assert metadata.digest is not None
        metadata.digest.validate(Digest.hash_variant(DigestAlgorithm.SHA256, variant))


def test_layout(repository: Path) -> None:
    """Variants of the same files, each with its metadata; what the builder needs; nothing else."""
    variants = {path.name: path for path in (repository / "build").iterdir()}
    assert set(variants) == {"torch-cpu", "torch-cuda"}
    assert {path.name for path in repository.iterdir()} == {"build", "torch-ext", "build.toml", "README.md", "LICENSE"}
    sources = package.package_files()
    assert {
        str(path.relative_to(repository / "torch-ext" / PYTHON_NAME)): path.read_text(encoding="utf-8")
        for path in (repository / "torch-ext" / PYTHON_NAME).rglob("*")
        if path.is_file()
    } == sources
    identifiers = set()
    for name, folder in variants.items():
        metadata = json.loads((folder / "metadata.json").read_text())
        identifiers.add(metadata["id"])
        files = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
        assert files == {*sources, "_ops.py", "metadata.json"} == {*metadata["digest"]["files"], "metadata.json"}
        for file, digest in metadata["digest"]["files"].items():
            assert base64.b64encode(hashlib.sha256((folder / file).read_bytes()).digest()).decode() == digest
        assert name == f"torch-{metadata['backend']['type']}"
        assert metadata["id"].isidentifier() and metadata["id"] in (folder / "_ops.py").read_text()
        assert all((folder / name).read_text() == text for name, text in sources.items())
    assert len(identifiers) == 2
    general = tomllib.loads((repository / "build.toml").read_text())["general"]
    assert (general["name"], general["version"]) == (package.NAME, package.VERSION)
    assert general["hub"]["repo-id"] == REPO_ID


def test_only_relative_imports() -> None:
    """Besides the standard library and torch."""
    for name, text in package.package_files().items():
        for found in re.findall(r"^ *(?:from|import) ([\w.]+)", text, re.MULTILINE) if name.endswith(".py") else ():
            top = found.split(".")[0]
            assert top in ("", "torch") or top in sys.stdlib_module_names, (name, found)


def test_all_programs_are_there() -> None:
    """The kernels' sources are the ones of this repository."""
    files = package.package_files()
    for kernel in package.all_kernels():
        text = "\n".join(files[f"cuda_ext/{part}"] for part in package.parts(kernel.file))
        assert text == source(kernel.file)
    assert [name for name in files if name.endswith(".c")] == ["cuda_ext/cpu/sjlt.c"]


def test_the_wheel_has_all_sources_and_no_script() -> None:
    given = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    sources = ["cuda_ext/cpu", *(f"cuda_ext/{path.name}" for path in (ROOT / "cuda_ext").glob("*.cu"))]
    assert given["force-include"] == {name: f"hf_trak/{name}" for name in sources}


def test_card(repository: Path) -> None:
    """Every field is filled in, and every function of the table exists."""
    card = (repository / "README.md").read_text(encoding="utf-8")
    assert not re.search(r"\{\w+\}", card)
    named = set(re.findall(r"`(\w+)\([xy], [kn]", card))
    assert named == {*FUNCTIONS, *(f"{name}_transposed" for name in FUNCTIONS)}
    assert all(hasattr(projectors, name) for name in named)


def test_same_bytes_again(repository: Path, tmp_path: Path) -> None:
    again = package.write_package(tmp_path / "again", REPO_ID)
    for path in again.rglob("*"):
        if path.is_file():
            assert path.read_bytes() == (repository / path.relative_to(again)).read_bytes()


def test_new_operators_for_other_sources(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The namespace follows the sources, so that two builds can be loaded together."""
    before = package._digest(package.package_files())
    changed = package._text
    monkeypatch.setattr(package, "_text", lambda module: changed(module) + "# another line\n")
    assert package._digest(package.package_files()) != before


def test_command_and_errors(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "new" / "package"
    package.main([str(folder), "--repo-id", REPO_ID])
    assert f"branch v{package.VERSION}" in capsys.readouterr().out
    with pytest.raises(FileExistsError, match="Expected a new one"):
        package.write_package(folder, REPO_ID)
    with pytest.raises(ValueError, match="owner/name"):
        package.write_package(tmp_path / "other", "no-owner")
    changed = package._text
    monkeypatch.setattr(package, "_text", lambda module: changed(module) + "import hf_trak.kernels\n")
    with pytest.raises(KernelError, match="cannot be made relative"):
        package.write_package(tmp_path / "other", REPO_ID)
    assert [path.name for path in tmp_path.iterdir()] == ["new"]
