"""`hf-trak evaluate`: compute the linear datamodeling score of a run."""

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
    """Scores, and the results of retraining on subsets."""

    run: str = field(
        metadata={
            "help": "Run made with `--all_scores`, or a .npy file of scores (n_train, n_targets); may stand first."
        }
    )
    masks: str = field(
        metadata={"help": ".npy file (subsets, n_train): true where a training row belongs to a subset."}
    )
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
        description="Compute the linear datamodeling score (TRAK paper, Section 2): the rank correlation between "
        "outputs that the scores predict for models trained on subsets, and measured ones.",
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


def _scores(path: Path) -> np.ndarray:
    """Read the scores, of shape `(n_train, n_targets)`, of a run or a .npy file."""
    if path.suffix == ".npy":
        return _array(str(path))
    directory = find_run(path)
    files = AttributionRun.load(directory).facts.get(SCORE_FILES)
    if files is None and (directory / _OLD_SCORES).is_file():  # runs of format 1 kept all scores under this name
        files = {_OLD_SCORES: None}
    if not files:
        raise IncompleteStoreError(
            f"The run {directory} has only the highest and lowest scores. Expected one with all scores. Run "
            "`hf-trak attribute --all_scores`, or give a .npy file."
        )
    return read_score_files(directory, files).with_format("numpy")["trak_scores"][:].T
