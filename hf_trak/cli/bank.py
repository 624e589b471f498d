"""Judging scores on a bank: what runs know of their data is compared with the bank, and results become a table."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hf_trak.errors import ConfigMismatchError
from hf_trak.evaluation import Bank, BankScore
from hf_trak.evaluation.bank import read_bank
from hf_trak.store.sealed import read_sealed


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
    described = read_bank(bank.directory)
    for found, key, what in (
        (facts.get("train_fingerprint"), "rows_fingerprint", "training rows"),
        (targets, "targets_fingerprint", "targets"),
    ):
        if found is not None and found != described[key]:
            raise ConfigMismatchError(
                f"The {what} of the run {directory} have the fingerprint {found}; those of the bank {bank.directory} "
                f"have {described[key]}. Expected the same rows with the same columns, in the same order. If they are "
                "the same in another form, as before tokenization, save the scores as a .npy file."
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
