"""`hf-trak evaluate`: compute the linear datamodeling score of scores, with a bank or with arrays of outputs."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tokenize import TokenError
from typing import Any

import numpy as np

from hf_trak.cli.parser import OutputArguments, answer, option, parse_yaml_and_args, table
from hf_trak.errors import ConfigMismatchError, IncompleteStoreError
from hf_trak.evaluation import Bank, BankScore, evaluate_bank, evaluate_lds
from hf_trak.report.run import AttributionRun
from hf_trak.report.run_record import find_run
from hf_trak.scores.score_files import SCORE_FILES, read_score_files
from hf_trak.store.sealed import read_sealed


@dataclass
class EvaluateArguments:
    """Scores, and what retraining on subsets has shown: `--bank` and `--scores`, or `--run`, `--masks` and
    `--outputs`."""

    bank: str | None = option("Bank of retrained models: a directory, or a dataset repo on the Hub.", None)
    scores: list[str] | None = option(
        "NAME=PATH of each method to judge on the bank. PATH is a run made with `--all_scores`, or a .npy "
        "file of scores (n_train, n_targets), higher for more helpful rows. Differences are those to the first.",
        None,
    )
    parts: list[str] | None = option(
        "Parts of the bank. By default all complete ones, except for repeats and removals.", None
    )
    targets: list[int] | None = option("Numbers of the targets to judge on, from 0. By default all.", None)
    revision: str | None = option("Branch, tag or commit of a bank on the Hub.", None)
    run: str | None = option(
        "Run made with `--all_scores`, or a .npy file of scores, to judge with --masks and --outputs; may "
        "stand first.",
        None,
    )
    masks: str | None = option(".npy file (subsets, n_train): true where a training row belongs to a subset.", None)
    outputs: str | None = option(
        ".npy file (subsets, n_targets): model outputs on the targets after training on each subset.", None
    )


def run(argv: Sequence[str]) -> int:
    """Print linear datamodeling scores. Returns the exit status, 2 if the command line is wrong."""
    args, output = parse_yaml_and_args(
        (EvaluateArguments, OutputArguments),
        argv,
        prog="hf-trak evaluate",
        description="Compute the linear datamodeling score (TRAK paper, Section 2): the rank correlation between "
        "outputs that the scores predict for models trained on subsets, and measured ones.",
    )
    if problem := _problem(args):
        print(f"hf-trak evaluate: error: {problem} See `hf-trak evaluate --help`.", file=sys.stderr)
        return 2
    if args.bank is None:
        content = _with_arrays(*(str(path) for path in (args.run, args.masks, args.outputs)))
        lines = table({name: content[name] for name in ("lds", "low", "high", "standard_error", "targets")})
    else:
        content, lines = _with_bank(args.bank, args)
    answer(content, lines, output.json)
    return 0


def _problem(args: EvaluateArguments) -> str | None:
    """Say what is wrong with the combination of arguments."""
    arrays, of_bank = ("run", "masks", "outputs"), ("scores", "parts", "targets", "revision")
    given = [f"--{name}" for name in (*arrays, *of_bank) if getattr(args, name) is not None]
    if args.bank is None:
        if others := [name for name in given if name[2:] in of_bank]:
            return f"Given without --bank: {', '.join(others)}. Expected the bank that the scores are judged on."
        if missing := [f"--{name}" for name in arrays if f"--{name}" not in given]:
            return f"Missing: {', '.join(missing)}. Expected --run, --masks and --outputs, or --bank and --scores."
        return None
    if others := [name for name in given if name[2:] in arrays]:
        return f"Given with --bank: {', '.join(others)}. Expected runs and files of scores as --scores NAME=PATH."
    pairs = [text.partition("=") for text in args.scores or ()]
    if not pairs:
        return "--bank is given without --scores. Expected NAME=PATH of at least one method."
    if wrong := ["".join(pair) for pair in pairs if not all(pair)]:
        return f"--scores is {wrong[0]!r}. Expected NAME=PATH, such as trak=scores.npy."
    names = [name for name, _, _ in pairs]
    if twice := [name for name in names if names.count(name) > 1]:
        return f"--scores has the name {twice[0]!r} twice. Expected a name of its own for each method."
    return None


def _with_arrays(run: str, masks: str, outputs: str) -> dict[str, Any]:
    result = evaluate_lds(_scores(Path(run)), _array(masks), _array(outputs))
    found = result.per_target
    return {
        "lds": result.mean.value,
        "low": result.mean.low,
        "high": result.mean.high,
        "standard_error": float(found.std(ddof=1) / np.sqrt(len(found))) if len(found) > 1 else None,
        "targets": len(found),
        "per_target": [round(float(value), 6) for value in found],
    }


def _with_bank(place: str, args: EvaluateArguments) -> tuple[dict[str, Any], list[str]]:
    from hf_trak.hub import load_bank  # slow to import

    bank = load_bank(place, revision=args.revision)
    pairs = [text.partition("=") for text in args.scores or ()]
    scores = {name: _scores(Path(path), bank) for name, _, path in pairs}
    results = evaluate_bank(bank, scores, parts=args.parts, targets=args.targets)
    content = {
        "bank": place,
        "train_rows": bank.n_train,
        "targets": bank.n_targets if args.targets is None else len(args.targets),
        "results": [result.to_dict() for result in results],
    }
    return content, as_table(results)


def _array(path: str) -> np.ndarray:
    """Memory-map a file of numbers, without allocating the shape that a damaged header may claim.

    Raises:
        FileNotFoundError: the file does not exist.
        ValueError: it does not hold an array of numbers, or is truncated.
    """
    if not Path(path).is_file():
        raise FileNotFoundError(f"{path!r} is not a file. Expected a .npy file of an array.")
    try:
        array = np.lib.format.open_memmap(path, mode="r")
    except (EOFError, OSError, OverflowError, SyntaxError, TokenError, TypeError, ValueError) as error:
        raise ValueError(
            f"{path!r} is damaged, or not a .npy file of numbers ({error}). Expected a file that `numpy.save` wrote. "
            "Save it again."
        ) from error
    if array.dtype.kind not in "biuf":
        raise ValueError(f"{path!r} holds values of the type {array.dtype}. Expected numbers, or true and false.")
    return array


def _scores(path: Path, bank: Bank | None = None) -> np.ndarray:
    """Read the scores, of shape `(n_train, n_targets)`, of a run or a .npy file; a run must have the bank's data."""
    if path.suffix == ".npy":
        return _array(str(path))
    directory = find_run(path)
    facts = AttributionRun.load(directory).facts
    if bank is not None:
        check_run(bank, directory, facts)
    files = facts.get(SCORE_FILES)
    if not files:
        raise IncompleteStoreError(
            f"The run {directory} has only the highest and lowest scores. Expected one with all scores. Run "
            "`hf-trak attribute --all_scores`, or give a .npy file."
        )
    return read_score_files(directory, files).with_format("numpy")["trak_scores"][:].T


def check_run(bank: Bank, directory: Path, facts: Mapping[str, Any]) -> None:
    """Compare training rows and targets of a run with those of a bank, as far as the run and its index record them.

    Args:
        bank: the bank.
        directory: directory of the run.
        facts: facts of the run.

    Raises:
        ConfigMismatchError: the run has other rows or targets; shows both.
        StoreError: the record of the run's targets is damaged.
    """
    targets = None
    place = directory.resolve()
    record = place.parents[1] / "experiments" / place.name / "experiment.json"
    if place.parent.name == "scores" and record.is_file():
        targets = read_sealed(record).get("dataset_fingerprint")
    for found, key, what in (
        (facts.get("train_fingerprint"), "rows_fingerprint", "training rows"),
        (targets, "targets_fingerprint", "targets"),
    ):
        if found is not None and found != bank.described[key]:
            raise ConfigMismatchError(
                f"The {what} of the run {directory} have the fingerprint {found}; those of the bank {bank.directory} "
                f"have {bank.described[key]}. Expected the same rows with the same columns, in the same order. If "
                "they are the same in another form, as before tokenization, save the scores as a .npy file."
            )


def as_table(results: Sequence[BankScore]) -> list[str]:
    """Format results in columns: for each part the methods, and below them the highest possible scores."""
    first = results[0].method
    lines: list[tuple[str, ...]] = [("part", "method", "LDS", f"difference to {first}")]
    last = {result.part: result for result in results}
    for result in results:
        difference = "" if result.difference is None else str(result.difference)
        lines.append((result.part, result.method, str(result.lds), difference))
        if result is last[result.part]:
            lines += [
                (result.part, f"highest possible ({name})", str(ceiling), "")
                for name, ceiling in result.ceilings.items()
            ]
    if len(last) == len(results):  # one method, which differs from none
        lines = [line[:3] for line in lines]
    widths = [max(len(cell) for cell in column) for column in zip(*lines, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]
