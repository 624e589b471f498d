"""Change one operator, sign or check of hf_trak at a time, and count the changes that the default tests notice.

    python benchmarks/mutations.py before.json --mutants 200 --minutes 60
    python benchmarks/mutations.py after.json --like before.json

Mutants are drawn with a seed, one package after the other, so that small packages have as many as large ones: a
comparison or an arithmetic operator exchanged, a sign or a `not` dropped, `and` for `or`, the condition of an `if`
that raises replaced by False. Each runs in a copy of the checkout, by the test files in the default selection that
name its module, then its names, then the rest of its package's folder, up to the first failure or a limit. The first
test that fails is written down. With `--like`, the mutants of another run are tried again: the test that noticed one
first, and all of them if that test is gone or passes. Results are written after every mutant and taken up from there.
"""

import argparse
import ast
import contextlib
import copy
import importlib
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = {
    "gradient_computers": ["gradients"], "modelout_functions": ["tasks", "data"], "projectors": ["projections"],
    "runtime": ["distributed", "identity"], "savers": ["traker"], "score_computers": ["traker"],
    "weights": ["identity"],
}  # fmt: skip
"""Folders of tests of the packages that have none of their own name; of single modules, those of the front door."""

MODELS = ("bert", "clip", "gpt2", "llama", "vit")
PRELOADED = [
    "datasets", "pytest", "torch.distributed.fsdp", "torch._dynamo", "torchvision", "transformers.trainer", "peft",
    "trl",
    *(f"transformers.models.{name}.modeling_{name}" for name in MODELS),
]  # fmt: skip
"""What many tests import."""

EXCHANGED: dict[type[ast.AST], type[ast.AST]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.Div: ast.Mult, ast.FloorDiv: ast.Add, ast.Mod: ast.Add,
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.And: ast.Or, ast.Or: ast.And,
}  # fmt: skip


def mutated(node: ast.AST) -> ast.AST | None:
    """Return a node with another meaning, or None for a node without a mutation."""
    other: Any = copy.deepcopy(node)
    if isinstance(node, ast.If) and isinstance(node.body[0], ast.Raise):
        other.test = ast.Constant(value=False)
    elif isinstance(node, ast.Compare) and type(node.ops[0]) in EXCHANGED:
        other.ops[0] = EXCHANGED[type(node.ops[0])]()
    elif isinstance(node, ast.BoolOp | ast.BinOp) and type(node.op) in EXCHANGED and not _is_text(node):
        other.op = EXCHANGED[type(node.op)]()
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.Not):
        other = other.operand
    else:
        return None
    return ast.fix_missing_locations(other)  # type: ignore[no-any-return]


def _is_text(node: ast.AST) -> bool:
    return any(
        isinstance(one, ast.JoinedStr) or (isinstance(one, ast.Constant) and isinstance(one.value, str))
        for one in ast.walk(node)
    )


def places(node: ast.AST, name: str = "") -> Iterator[tuple[str, str, ast.AST, str, int | None]]:
    """Yield mutable nodes below one: name of the function, source, parent, field and position in the field."""
    for field, value in ast.iter_fields(node):
        if field in ("annotation", "returns", "decorator_list", "type_params", "msg", "exc"):
            continue
        for position, child in enumerate(value) if isinstance(value, list) else [(None, value)]:
            if not isinstance(child, ast.AST) or isinstance(child, ast.JoinedStr):
                continue
            inner = isinstance(child, ast.FunctionDef | ast.ClassDef)
            below = f"{name}.{child.name}".lstrip(".") if inner else name  # type: ignore[attr-defined]
            if name and mutated(child) is not None:
                yield name, ast.unparse(child), node, field, position
            yield from places(child, below)


def of_checkout(root: Path, seed: int) -> Iterator[dict[str, Any]]:
    """Draw mutants without repetition, of every package in turn."""
    rng = random.Random(seed)
    packages: dict[str, list[dict[str, Any]]] = {}
    for path in sorted((root / "hf_trak").rglob("*.py")):
        parts = path.relative_to(root / "hf_trak").with_suffix("").parts
        seen: dict[tuple[str, str], int] = {}
        for name, source, *_ in places(ast.parse(path.read_text(encoding="utf-8"))):
            number = seen[name, source] = seen.get((name, source), -1) + 1
            one = {"file": path.relative_to(root).as_posix(), "function": name, "source": source, "number": number}
            packages.setdefault(parts[0] if len(parts) > 1 else "", []).append(one)
    for found in packages.values():
        rng.shuffle(found)
    names = sorted(packages)
    while any(packages.values()):
        rng.shuffle(names)
        yield from (packages[name].pop() for name in names if packages[name])


def source_of(root: Path, mutant: dict[str, Any]) -> str | None:
    """Return the source of a mutant's file with the mutation, or None where its line is no more."""
    path = root / mutant["file"]
    if not path.exists():
        return None
    tree = ast.parse(path.read_text(encoding="utf-8"))
    left = mutant["number"]
    for name, source, parent, field, position in places(tree):
        if (name, source) == (mutant["function"], mutant["source"]):
            if left == 0:
                value = getattr(parent, field)
                other = mutated(value if position is None else value[position])
                mutant["line"] = getattr(value if position is None else value[position], "lineno", 0)
                mutant["mutation"] = ast.unparse(other).splitlines()[0]  # type: ignore[arg-type]
                if position is None:
                    setattr(parent, field, other)
                else:
                    value[position] = other
                return ast.unparse(tree)
            left -= 1
    return None


def tests_of(root: Path, file: str) -> list[str]:
    """Return the test files for a module, those first that name it."""
    parts = Path(file).with_suffix("").parts
    module = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
    folders = FOLDERS.get(parts[1], [parts[1]]) if len(parts) > 2 else ["featurize"]
    tree = ast.parse((root / file).read_text(encoding="utf-8"))
    defined = [one.name for one in tree.body if isinstance(one, ast.FunctionDef | ast.ClassDef) and one.name[0] != "_"]
    ranked = []
    for path in sorted((root / "tests").glob("*/test_*.py")):
        text = path.read_text(encoding="utf-8")
        home = path.parent.name in folders
        rank = 0 if module in text else 1 if any(name in text for name in defined) else 2
        if rank == 0 or home:
            ranked.append((rank, not home, len(text), path.relative_to(root).as_posix()))
    return [path for *_, path in sorted(ranked)]


class First:
    """A pytest plugin that writes the first test that fails, and why, into a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Take the report of one test."""
        if report.failed and not self.path.exists():
            self.path.write_text(json.dumps([report.nodeid, str(report.longrepr)[-300:]]), encoding="utf-8")

    def pytest_collectreport(self, report: Any) -> None:
        """Take the report of a file that cannot be imported."""
        self.pytest_runtest_logreport(report)


def spent() -> float:
    """Return the processor seconds of this process and of those that it has waited for."""
    return sum(os.times()[:4])


def noticed(copied: Path, tests: str) -> list[str]:
    """Run tests in a fork of this process, and return the first that fails and the end of its report."""
    found = copied / "first.json"
    found.unlink(missing_ok=True)
    child = os.fork()
    if child == 0:
        os.setsid()
        log = os.open(copied / "log.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.chdir(copied)
        os.environ["PYTHONPATH"] = str(copied)
        sys.path.insert(0, str(copied))
        sys.modules["__main__"] = types.ModuleType("__main__")
        import pytest

        pytest.main(["-x", "-q", "-p", "no:cacheprovider", "--timeout", "300", tests], plugins=[First(found)])
        os._exit(0)
    os.waitpid(child, 0)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)  # processes that a test has left
    return json.loads(found.read_text(encoding="utf-8")) if found.exists() else []


def tried(copied: Path, mutant: dict[str, Any], limit: float) -> dict[str, Any]:
    """Run the tests of one mutant."""
    before = spent()
    path, first = copied / mutant["file"], mutant.get("first")
    original = path.read_text(encoding="utf-8") if path.exists() else ""
    source = source_of(copied, mutant)
    if source is None:
        return {**mutant, "result": "gone"}
    files, result = tests_of(copied, mutant["file"]), "survived"
    try:
        path.write_text(source, encoding="utf-8")
        for one in [*([first[0]] if first else []), *files]:
            if spent() - before > limit:
                result = "not within the limit"
                break
            found = noticed(copied, one)
            if found:
                result, first = "noticed", found
                break
    finally:
        path.write_text(original, encoding="utf-8")
    return {**mutant, "result": result, "first": first, "tests": files, "seconds": round(spent() - before, 1)}


def main() -> None:
    """Try mutants, and print how many were noticed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    parser.add_argument("--mutants", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=60, help="stop after so many, to go on another time")
    parser.add_argument("--limit", type=float, default=40, help="processor seconds for the tests of one mutant")
    parser.add_argument("--like", type=Path, help="results of another run, mutants of which are tried again")
    given = parser.parse_args()
    results = json.loads(given.results.read_text(encoding="utf-8")) if given.results.exists() else []
    if given.like:
        drawn = [one for one in json.loads(given.like.read_text(encoding="utf-8")) if one["result"] == "noticed"]
    else:
        draws = of_checkout(ROOT, given.seed)
        drawn = [mutant for mutant, _ in zip(draws, range(given.mutants), strict=False)]
    # What every run of tests imports is imported once; nothing is computed here, or forks could not compute.
    for name in PRELOADED:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    until = time.monotonic() + 60 * given.minutes
    with tempfile.TemporaryDirectory() as directory:
        copied = Path(directory) / "checkout"
        shutil.copytree(ROOT, copied, ignore=shutil.ignore_patterns(".git", ".venv", "__pycache__", ".*_cache"))
        for mutant in drawn[len(results) :]:
            if time.monotonic() > until:
                break
            results.append(tried(copied, mutant, given.limit))
            given.results.write_text(json.dumps(results, indent=1), encoding="utf-8")
            one = results[-1]
            place = f"{one['file']}:{one.get('line')} {one['function']}"
            print(f"{one['result']}: {place}: {one.get('mutation')}", flush=True)
    counts: dict[str, int] = {}
    for one in results:
        counts[one["result"]] = counts.get(one["result"], 0) + 1
    print(len(results), "mutants:", ", ".join(f"{count} {result}" for result, count in sorted(counts.items())))


if __name__ == "__main__":
    main()
