"""Make a package for the Hub's `kernels` library of the projections: the functions, operators and CUDA sources.

    python cuda_ext/hub/build_package.py random-projections --repo-id YOUR_NAME/random-projections

The folder is a repository of type `kernel` as it would be on the Hub, see [`write_package`]. Its modules are copies of
those of hf_trak that `hf_trak/projectors/functional.py` needs, with relative imports and with operators in a namespace
of their own, so that it needs torch alone.
"""

import argparse
import ast
import base64
import hashlib
import json
import re
import shutil
import tempfile
from pathlib import Path

import hf_trak
from hf_trak.errors import KernelError
from hf_trak.kernels.sources import all_kernels, cpu_source, parts, source_directory
from hf_trak.version import __version__

NAME = "random-projections"
"""Name of the package; with underscores, that of the Python module."""

VERSION = 0
"""Version of the package's interface, and with a `v` before it the branch on the Hub; 0 while it may still change."""

BACKENDS = ("cpu", "cuda")
"""Build variants. They hold the same files: which device a tensor is on decides what runs."""

KERNELS_MINVER = "0.17.0"
"""Oldest version of the `kernels` library that the layout has been loaded with."""

_TEMPLATES = Path(__file__).resolve().parent
_ROOT = Path(hf_trak.__file__).resolve().parent
_ENTRY = "hf_trak.projectors.functional"
_OPERATORS = "hf_trak.kernels.ops"
_CPU_SOURCES = ("sjlt",)  # `codes` is for scores alone
_REPO_ID = re.compile(r"[A-Za-z0-9_.-]+/[A-Za-z0-9_.-]+")


def write_package(folder: Path, repo_id: str) -> Path:
    """Write the package as a repository of the Hub's type `kernel`.

    `build/torch-cpu` and `build/torch-cuda` are what `kernels` loads: modules, the sources in `cuda_ext/`, `_ops.py`
    with the namespace of the operators, and `metadata.json`. `torch-ext/` and `build.toml` are for its builder, which
    makes the same variants. `README.md` is the card. The bytes depend on the sources and on `repo_id` alone.

    Args:
        folder (`Path`):
            Where to write. It is made, and must not exist.
        repo_id (`str`):
            Name of the repository on the Hub, for the card and for `build.toml`.

    Returns:
        `Path`: the folder.

    Raises:
        FileExistsError: the folder exists.
        KernelError: a module cannot be copied, since it imports hf_trak in a way that cannot be made relative.
        ValueError: `repo_id` has not the form `owner/name`.
    """
    if folder.exists():
        raise FileExistsError(f"The folder {folder} exists. Expected a new one. Delete it, or choose another name.")
    if not _REPO_ID.fullmatch(repo_id):
        raise ValueError(f"The repo id is '{repo_id}'. Expected `owner/name`. Pass the name of the Hub repository.")
    files = package_files()
    digest = _digest(files)
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}-"))
    try:
        for backend in BACKENDS:
            _write_variant(temporary / "build" / f"torch-{backend}", files, backend, digest)
        _write(temporary / "torch-ext" / _python_name(), files)
        _write(temporary, _repository_files(repo_id, digest))
        temporary.chmod(0o755)  # `mkdtemp` makes folders for their owner alone
        temporary.rename(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return folder


def package_files() -> dict[str, str]:
    """Return the files that all variants share: their paths in the package and their texts.

    Raises:
        KernelError: a module imports hf_trak in a way that cannot be made relative.
    """
    modules = _needed(_ENTRY)
    files = {_path_in_package(module): _made_relative(module) for module in sorted(modules)}
    for directory in sorted({path.rpartition("/")[0] for path in files} - {""}):
        files[f"{directory}/__init__.py"] = f'"""Modules of hf_trak\'s `{directory}` that the projections need."""\n'
    files["__init__.py"] = (_TEMPLATES / "init.py").read_text(encoding="utf-8")
    for name in dict.fromkeys(part for kernel in all_kernels() for part in parts(kernel.file)):
        files[f"cuda_ext/{name}"] = (source_directory() / name).read_text(encoding="utf-8")
    for name in _CPU_SOURCES:
        files[f"cuda_ext/cpu/{name}.c"] = cpu_source(name)
    return files


def _write_variant(folder: Path, files: dict[str, str], backend: str, digest: str) -> None:
    identifier = _identifier(backend, digest)
    files = files | {"_ops.py": _namespace_module(identifier)}
    hashes = {name: _sha256(text) for name, text in sorted(files.items())}
    metadata = {
        "id": identifier,
        "name": NAME,
        "version": VERSION,
        "kernels-minver": KERNELS_MINVER,
        "license": "Apache-2.0",
        "python-depends": [],
        "backend": {"type": backend},
        "digest": {"algorithm": "sha256", "files": hashes},
    }
    _write(folder, files | {"metadata.json": json.dumps(metadata, indent=2) + "\n"})


def _repository_files(repo_id: str, digest: str) -> dict[str, str]:
    fields = {
        "name": NAME,
        "version": str(VERSION),
        "repo_id": repo_id,
        "minver": KERNELS_MINVER,
        "identifier": _identifier("<backend>", digest),
        "source_version": __version__,
    }
    texts = {"README.md": "CARD.md", "build.toml": "build.toml"}
    found = {"LICENSE": (_TEMPLATES.parents[1] / "LICENSE").read_text(encoding="utf-8")}
    for name, template in texts.items():
        text = (_TEMPLATES / template).read_text(encoding="utf-8")
        for field, value in fields.items():
            text = text.replace(f"{{{field}}}", value)
        found[name] = text
    return found


def _needed(entry: str) -> set[str]:
    """Follow imports of hf_trak's modules, inside of functions as well."""
    found: set[str] = set()
    waiting = [entry]
    while waiting:
        module = waiting.pop()
        if module not in found:
            found.add(module)
            waiting += [target for node in _imports(module) for target in _targets(node, module)]
    return found


def _imports(module: str) -> list[ast.ImportFrom]:
    """List a module's imports from hf_trak."""
    nodes = list(ast.walk(ast.parse(_text(module))))
    plain = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    if any(name.split(".")[0] == "hf_trak" for name in plain):
        raise KernelError(
            f"The module {module} has a line `import hf_trak…`, which cannot be made relative. Expected "
            "`from hf_trak… import …`. Please report this."
        )
    imports = [node for node in nodes if isinstance(node, ast.ImportFrom)]
    return [node for node in imports if (node.module or "").split(".")[0] == "hf_trak"]


def _targets(node: ast.ImportFrom, module: str) -> list[str]:
    """Return the module that each imported name is in, or is: `from hf_trak.kernels import torch_hadamard`."""
    source = str(node.module)
    if _file(source).name != "__init__.py":
        return [source]
    targets = [f"{source}.{alias.name}" for alias in node.names]
    for target in targets:
        if not _file(target).is_file():
            raise KernelError(
                f"The module {module} imports {target}, which is defined in the package {source} itself. Expected an "
                "import from the module that defines it. Please report this."
            )
    return targets


def _made_relative(module: str) -> str:
    """Return a module's text with relative imports, and with operators in the package's namespace."""
    lines = _text(module).splitlines(keepends=True)
    for node in _imports(module):
        made = f"from {_relative(str(node.module), module)} import"
        lines[node.lineno - 1] = lines[node.lineno - 1].replace(f"from {node.module} import", made)
    text = "".join(lines)
    if module == _OPERATORS:
        text = _in_own_namespace(text)
    if re.search(r'^\s*(from|import) hf_trak|"hf_trak::', text, re.MULTILINE):
        raise KernelError(f"The module {module} still names hf_trak after its imports were made relative.")
    return text


def _in_own_namespace(text: str) -> str:
    """Register operators as `kernels` wants them: under a name that `_ops.py` gives them."""
    text = re.sub(r'"hf_trak::(\w+)"', r'add_op_namespace_prefix("\1")', text)
    text = text.replace("`torch.ops.hf_trak.*`", "`ops.*` of `_ops.py`")
    return text.replace("import Tensor\n", "import Tensor\n\nfrom .._ops import add_op_namespace_prefix\n", 1)


def _relative(target: str, module: str) -> str:
    """Write a module's or package's name as seen from another: `hf_trak.kernels.philox` is `..kernels.philox`."""
    depth = module.count(".")
    return "." * depth + target.partition(".")[2]


def _file(module: str) -> Path:
    path = _ROOT.joinpath(*module.split(".")[1:])
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def _text(module: str) -> str:
    return _file(module).read_text(encoding="utf-8")


def _path_in_package(module: str) -> str:
    return module.partition(".")[2].replace(".", "/") + ".py"


def _namespace_module(identifier: str) -> str:
    return f'''"""The namespace of this build's operators."""

import torch

_OPS_NAME = "{identifier}"

ops = getattr(torch.ops, _OPS_NAME)


def add_op_namespace_prefix(op_name: str) -> str:
    """Put the namespace before an operator's name."""
    return f"{{_OPS_NAME}}::{{op_name}}"
'''


def _python_name() -> str:
    return NAME.replace("-", "_")


def _identifier(backend: str, digest: str) -> str:
    return f"_{_python_name()}_{backend}_{digest}"


def _digest(files: dict[str, str]) -> str:
    listing = "".join(f"{name}\0{_sha256(text)}\n" for name, text in sorted(files.items()))
    return hashlib.sha256(listing.encode()).hexdigest()[:10]


def _sha256(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode("utf-8")).digest()).decode()


def _write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text.encode("utf-8"))


def main(arguments: list[str] | None = None) -> None:
    """Run the command, see the module's docstring."""
    parser = argparse.ArgumentParser(
        prog="python cuda_ext/hub/build_package.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", type=Path, help="where to write; must not exist")
    parser.add_argument("--repo-id", required=True, help="name of the repository on the Hub, owner/name")
    args = parser.parse_args(arguments)
    folder = write_package(args.folder, args.repo_id)
    print(
        f"Wrote {folder}. Try it with `kernels.get_local_kernel(Path('{folder}'))`. To publish it, upload the folder "
        f"to the branch v{VERSION} of {args.repo_id}, a Hub repository of type `kernel`."
    )


if __name__ == "__main__":
    main()
