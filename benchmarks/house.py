"""Count what a reader of hf_trak has to hold in the head, in this checkout and in another one.

    python benchmarks/house.py
    python benchmarks/house.py --against /path/to/another/checkout

A code line is neither blank nor part of a comment or docstring. Packages are the parts of `hf_trak` of one level; an
arrow is a pair of packages with imports from one to the other, and the floors are the longest chain of arrows.
"""

import argparse
import ast
import io
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LAYOUT = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
FILE_PACKAGES = ("store", "traker/savers", "report/run", "hub", "evaluation/bank", "evaluation/retraining_files")
"""Beginnings of the paths of modules that do nothing but files on disk; of `hub`, the names in `HUB_FILES`."""

LATER = (
    "trajectory", "featurize/calibrat", "featurize/replaying", "featurize/run_replaying", "featurize/answering",
    "evaluation/review", "modelout_functions/trainer_", "engines", "store/table", "scores/tables", "report/training",
    "report/words", "cli/training_report", "store/lance_table", "scores/gram_sample", "featurize/cluster",
    "featurize/roofline", "featurize/batch_counts", "runtime/counting", "kernels/cpu_codes",
)  # fmt: skip
"""Beginnings of the paths of capabilities that came after the library was cut: replay, calibration, review, the loss
of a trainer, tables and engines, the report of a training, words with their sources, samples of rows, estimates for
clusters and GPUs, and compiled products of codes."""

HUB_FILES = ("files", "manifest", "index_", "curvature_", "banks", "remote_rows", "ranges", "ranged", "parquet")


@cache
def tree_of(path: Path) -> ast.Module:
    """Parse a file."""
    return ast.parse(path.read_text(encoding="utf-8"))


def docstring_lines(tree: ast.Module) -> set[int]:
    """Return the numbers of the lines of all docstrings, and of the strings that describe constants."""
    found: set[int] = set()
    for node in ast.walk(tree):
        for one in getattr(node, "body", []) if not isinstance(node, ast.Lambda | ast.IfExp) else []:
            if isinstance(one, ast.Expr) and isinstance(one.value, ast.Constant) and isinstance(one.value.value, str):
                found.update(range(one.lineno, (one.end_lineno or one.lineno) + 1))
    return found


@cache
def code_lines(path: Path) -> frozenset[int]:
    """Return the numbers of the code lines of a file."""
    text = path.read_text(encoding="utf-8")
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in LAYOUT:
            lines.update(range(token.start[0], token.end[0] + 1))
    return frozenset(lines - docstring_lines(tree_of(path)))


def total(paths: list[Path]) -> int:
    """Add up the code lines of files."""
    return sum(len(code_lines(path)) for path in paths)


def inside(paths: list[Path], kind: type[ast.AST] | tuple[type[ast.AST], ...]) -> int:
    """Count the code lines inside nodes of a kind."""
    count = 0
    for path in paths:
        lines: set[int] = set()
        for node in ast.walk(tree_of(path)):
            if isinstance(node, kind):
                lines.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))  # type: ignore[attr-defined]
        count += len(lines & code_lines(path))
    return count


def methods(root: Path, *files: tuple[str, str]) -> Iterator[ast.FunctionDef]:
    """Yield the public methods of classes that a user meets under one name, inherited ones once."""
    seen: set[str] = set()
    for file, name in files:
        path = root / "hf_trak" / file
        for node in tree_of(path).body if path.exists() else []:
            if isinstance(node, ast.ClassDef) and node.name == name:
                for one in node.body:
                    public = isinstance(one, ast.FunctionDef) and (one.name == "__init__" or one.name[0] != "_")
                    if public and one.name not in seen:  # type: ignore[union-attr]
                        seen.add(one.name)  # type: ignore[union-attr]
                        yield one  # type: ignore[misc]


def front_door(root: Path) -> tuple[int, int]:
    """Count the public names of `TrakAttributor` and their parameters."""
    bases = [("attributor.py", "TrakAttributor")]
    declared = next(
        node for node in tree_of(root / "hf_trak/attributor.py").body
        if isinstance(node, ast.ClassDef) and node.name == "TrakAttributor"
    )  # fmt: skip
    if declared.bases:
        bases.append(("featurize/featurized.py", "FeaturizedModel"))
    found = list(methods(root, *bases))
    parameters = 0
    for one in found:
        arguments = one.args
        named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
        parameters += len([item for item in named if item.arg not in ("self", "cls")])
        parameters += (arguments.vararg is not None) + (arguments.kwarg is not None)
    return sum(one.name != "__init__" for one in found), parameters


def config_fields(root: Path) -> str:
    """Count the fields of `TrakConfig`, and of the configurations inside it."""
    counts = {}
    for node in tree_of(root / "hf_trak/config.py").body:
        if isinstance(node, ast.ClassDef) and node.name.endswith("Config"):
            counts[node.name] = sum(isinstance(one, ast.AnnAssign) for one in node.body)
    main = counts.pop("TrakConfig")
    return str(main) if not counts else f"{main} + {sum(counts.values())} nested"


def about_files(path: Path, root: Path) -> bool:
    """Tell whether a module does nothing but files on disk."""
    name = path.relative_to(root / "hf_trak").as_posix()
    if name.startswith("hub/"):
        return name.removeprefix("hub/").startswith(HUB_FILES)
    return name.startswith(FILE_PACKAGES)


def came_later(path: Path, root: Path) -> bool:
    """Tell whether a module belongs to a capability that came after the library was cut."""
    return path.relative_to(root / "hf_trak").as_posix().startswith(LATER)


def arrows(root: Path, paths: list[Path]) -> set[tuple[str, str]]:
    """Return the pairs of packages with imports from the first to the second, also inside functions."""
    found = set()
    for path in paths:
        parts = path.relative_to(root / "hf_trak").with_suffix("").parts
        for node in ast.walk(tree_of(path)):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [one.name for one in node.names] if isinstance(node, ast.Import) else []
            for name in names:
                if name.startswith("hf_trak.") and name.split(".")[1] != parts[0]:
                    found.add((parts[0], name.split(".")[1]))
    return found


def floors_and_circles(pairs: set[tuple[str, str]]) -> tuple[int, int]:
    """Return the length of the longest chain of arrows, and the number of packages that reach themselves."""
    below = {start: {b for a, b in pairs if a == start} for start, _ in pairs}
    reached = {start: set(ends) for start, ends in below.items()}
    for _ in below:
        for start in reached:
            reached[start] |= {far for end in set(reached[start]) for far in reached.get(end, ())}
    circles = sum(start in reached[start] for start in reached)

    def depth(one: str, seen: frozenset[str] = frozenset()) -> int:
        return 1 + max((depth(end, seen | {one}) for end in below.get(one, ()) if end not in seen), default=0)

    return (0 if circles else max(depth(start) for start in below)), circles


def words(paths: list[Path]) -> int:
    """Count the words of pages."""
    return sum(len(path.read_text(encoding="utf-8").split()) for path in paths)


def counted(root: Path) -> dict[str, str]:
    """Count everything in a checkout."""
    paths = sorted((root / "hf_trak").rglob("*.py"))
    sizes = sorted(len(path.read_text(encoding="utf-8").splitlines()) for path in paths)
    code, (names, parameters) = total(paths), front_door(root)
    pairs = arrows(root, paths)
    floors, circles = floors_and_circles(pairs)
    recipes = [path for path in (root / "recipes").rglob("*.py") if "benchmarks" not in path.parts]
    benchmarks = [path for place in ("benchmarks", "recipes/benchmarks") for path in (root / place).rglob("*.py")]
    return {
        "code lines of the library": f"{code:,}",
        "of them, of capabilities that came later": f"{total([path for path in paths if came_later(path, root)]):,}",
        "files; median lines; under 60 lines": f"{len(paths)}; {sizes[len(sizes) // 2]}; {sum(s < 60 for s in sizes)}",
        "import lines": f"{inside(paths, (ast.Import, ast.ImportFrom)) / code:.1%}",
        "lines inside `raise`": f"{inside(paths, ast.Raise) / code:.1%}",
        "public names of `TrakAttributor`; parameters": f"{names}; {parameters}",
        "fields of `TrakConfig`": config_fields(root),
        "code lines about files on disk": f"{total([path for path in paths if about_files(path, root)]):,}",
        "packages and modules of the first level; arrows": f"{len({a for a, _ in pairs})}; {len(pairs)}",
        "floors; circles": f"{floors}; {circles}",
        "code lines of tests": f"{total(sorted((root / 'tests').rglob('*.py'))):,}",
        "code lines of recipes; of benchmarks": f"{total(recipes):,}; {total(benchmarks):,}",
        "pages; words": f"{len(list((root / 'docs').rglob('*.md')))}; {words(list((root / 'docs').rglob('*.md'))):,}",
        "words of the README": f"{words([root / 'README.md']):,}",
    }


def main() -> None:
    """Print a table of one or two checkouts."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--against", type=Path, help="the other checkout")
    given = parser.parse_args()
    roots = {"here": ROOT} if given.against is None else {"there": given.against.resolve(), "here": ROOT}
    columns = [counted(root) for root in roots.values()]
    print("| |", " | ".join(roots), "|")
    print("|---|" + "---|" * len(roots))
    for name in columns[0]:
        print(f"| {name} |", " | ".join(column[name] for column in columns), "|")


if __name__ == "__main__":
    main()
