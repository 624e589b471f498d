"""`hf-trak evaluate`."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tokenize import TokenError

import numpy as np

from hf_trak.cli.arguments import OutputArguments
from hf_trak.cli.output import answer, table
from hf_trak.cli.parser import parse_yaml_and_args
from hf_trak.errors import IncompleteStoreError
from hf_trak.evaluation import evaluate_lds
from hf_trak.report.run import AttributionRun, find_run
from hf_trak.scores.score_files import SCORE_FILES, read_score_files


@dataclass
class EvaluateArguments:
    """Scores, and what retraining on subsets has shown."""

    run: str = field(
        metadata={
            "help": "Run made with `--all_scores`, or a .npy file of scores (n_train, n_targets); may stand first."
        }
    )
    masks: str = field(metadata={"help": ".npy file (subsets, n_train): which training rows belong to which subset."})
    outputs: str = field(
        metadata={
            "help": ".npy file (subsets, n_targets): model outputs on the targets after training on each subset."
        }
    )


def run(argv: Sequence[str]) -> None:
    """Print the linear datamodeling score."""
    args, output = parse_yaml_and_args(
        (EvaluateArguments, OutputArguments),
        argv,
        prog="hf-trak evaluate",
        description="The linear datamodeling score (TRAK paper, Section 2): how well the scores predict retraining.",
    )
    scores = _scores(Path(args.run))
    result = evaluate_lds(scores, _array(args.masks), _array(args.outputs))
    found = result.per_target
    content = {
        "lds": result.mean.value,
        "low": result.mean.low,
        "high": result.mean.high,
        "standard_error": float(found.std(ddof=1) / np.sqrt(len(found))) if len(found) > 1 else None,
        "targets": len(found),
        "per_target": [round(float(value), 6) for value in found],
    }
    answer(
        content,
        table({name: content[name] for name in ("lds", "low", "high", "standard_error", "targets")}),
        output.json,
    )


_OLD_SCORES = "per-target.arrow"


def _array(path: str) -> np.ndarray:
    """A file of numbers, which is mapped: a few bytes may claim any shape.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it holds no array of numbers, or less than it says.
    """
    if not Path(path).is_file():
        raise FileNotFoundError(f"{path!r} is no file. Expected a .npy array.")
    try:
        array = np.lib.format.open_memmap(path, mode="r")
    except (EOFError, OSError, OverflowError, SyntaxError, TokenError, TypeError, ValueError) as error:
        raise ValueError(
            f"{path!r} is damaged, or no .npy file of numbers ({error}). Expected what `numpy.save` writes. Save it "
            "anew."
        ) from error
    if array.dtype.kind not in "biuf":
        raise ValueError(f"{path!r} holds values of the type {array.dtype}. Expected numbers, or true and false.")
    return array


def _scores(path: Path) -> np.ndarray:
    """(n_train, n_targets)."""
    if path.suffix == ".npy":
        return _array(str(path))
    directory = find_run(path)
    files = AttributionRun.load(directory).facts.get(SCORE_FILES)
    if files is None and (directory / _OLD_SCORES).is_file():  # runs of format 1 kept all scores under this name
        files = {_OLD_SCORES: None}
    if not files:
        raise IncompleteStoreError(
            f"The run {directory} keeps the highest and lowest scores alone. Expected one with all scores. Run "
            "`hf-trak attribute --all_scores`, or give a .npy file."
        )
    return read_score_files(directory, files).with_format("numpy")["trak_scores"][:].T
