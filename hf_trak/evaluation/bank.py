"""A bank of retrained models' outputs, which any attribution method can be judged on.

Retraining is the expensive part of an evaluation, and its results serve every method. A bank keeps them in a directory
that can be built by many processes and jobs, published, and used by others: subsets of the training rows, the outputs
on the targets of models retrained on them, seeds, the recipe, and fingerprints of both datasets. Each part is a
directory of retrainings, see `hf_trak.evaluation.retraining_files`; `bank.json` says what all parts have in common.

A bank has parts, each with its own subsets and protocol: 1 % of the rows dropped, say, and 50 %; repeats that tell the
noise; removals of the rows that a method found (`hf_trak.evaluation.removal`).
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike

from hf_trak.errors import ConfigMismatchError, IncompleteStoreError, NonFiniteError, StoreError
from hf_trak.evaluation.intervals import (
    RESAMPLES,
    Interval,
    Result,
    check_resamples,
    checked_numbers,
    quantile_interval,
    spearman,
)
from hf_trak.evaluation.lds import predicted_and_measured, resampled_lds
from hf_trak.evaluation.reliability import Reliability, measure_reliability
from hf_trak.evaluation.retraining import Retrain, check_masks, train_missing
from hf_trak.evaluation.retraining_files import (
    CONFIG,
    OUTPUTS,
    SUBSETS,
    RetrainingFiles,
    all_trainings,
    create_described,
    read_described,
    subset_digest,
    verify_retraining,
)
from hf_trak.identity.row_digest import fingerprint_dataset
from hf_trak.runtime.checks import checked_int
from hf_trak.runtime.processes import Processes
from hf_trak.store.atomic import differing, safe_name
from hf_trak.store.sealed import Finding, content_digest
from hf_trak.store.verification import judged

BANK = "bank.json"

_BANK_KEYS = {
    "kind": str,
    "rows": int,
    "targets": int,
    "rows_fingerprint": str,
    "targets_fingerprint": str,
    "recipe": dict,
}

_PART_KEYS = {
    "name": str,
    "rows": int,
    "seed": int,
    "bank": str,
    "subsets": int,
    "repeats": int,
    "protocol": dict,
    "masks": str,
}


@dataclass(frozen=True)
class BankPart:
    """One part of a bank, whose trainings are all done.

    Attributes:
        name (`str`):
            Name of the part.
        masks (`np.ndarray` of shape `(s, n)`):
            True where a training row belongs to the subset.
        outputs (`np.ndarray` of shape `(R, s, m)`):
            Outputs on the targets, float64, of R trainings on each subset.
        seeds (`np.ndarray` of shape `(R, s)`):
            Seed that each training was given.
        protocol (`dict[str, Any]`):
            How was trained: `drop`, `seed` and `perturbation` of [`TrainerRetraining`], or what the maker said.
        repeat_of (`str`, *optional*):
            The part whose first s subsets these are, trained again in another way.
        removal (`dict[str, Any]`, *optional*):
            The removals that the subsets stand for, if the part was made of such.
    """

    name: str
    masks: np.ndarray
    outputs: np.ndarray
    seeds: np.ndarray
    protocol: dict[str, Any]
    repeat_of: str | None
    removal: dict[str, Any] | None

    @property
    def truth(self) -> np.ndarray:
        """Average the outputs over the repeats, `(s, m)`."""
        return self.outputs.mean(axis=0)


class Bank:
    """A directory of subsets and of the outputs of models retrained on them.

    ```python
    bank = Bank.create("bank", train_dataset, targets, recipe={"model": "my-model"})
    retrain = TrainerRetraining(make_trainer, train_dataset, targets, drop="mask", seed=0)
    bank.add_part("drop-0.05", random_subsets(len(train_dataset), 50, 0.95), protocol=retrain.protocol)
    bank.build("drop-0.05", retrain)
    ```

    Attributes:
        directory (`Path`):
            The directory.
        described (`dict[str, Any]`):
            What `bank.json` says.
        recipe (`dict[str, Any]`):
            What its maker says about model, data and training.
        n_train (`int`):
            Number of training rows, n.
        n_targets (`int`):
            Number of targets, m.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        """Open a bank that exists. [`Bank.create`] makes one, and [`~hf_trak.hub.load_bank`] fetches one from the Hub.

        Args:
            directory (`str` or `os.PathLike`):
                Directory of the bank.

        Raises:
            IncompleteStoreError: there is no bank in this directory.
            StoreError: its description is damaged.
        """
        self.directory = Path(directory)
        absent = f"{directory} holds no bank: {BANK} is missing. Expected a directory that `Bank.create` made."
        self.described = read_described(self.directory / BANK, _BANK_KEYS, absent)
        self.recipe: dict[str, Any] = self.described["recipe"]
        self.n_train: int = self.described["rows"]
        self.n_targets: int = self.described["targets"]
        if self.described["kind"] != "bank" or self.n_train < 1 or self.n_targets < 1:
            raise StoreError(
                f"{self.directory / BANK} says the kind {self.described['kind']!r}, {self.n_train} rows and "
                f"{self.n_targets} targets. Expected a bank with at least one of each. Restore it from a copy."
            )

    def __repr__(self) -> str:
        return f"Bank({str(self.directory)!r}, {self.n_train} rows, {self.n_targets} targets, parts: {self.parts})"

    @classmethod
    def create(
        cls,
        directory: str | os.PathLike[str],
        train_dataset: Any,
        eval_dataset: Any,
        recipe: Mapping[str, Any] | None = None,
    ) -> "Bank":
        """Create a bank of these rows and targets, or open it if it exists.

        Args:
            directory (`str` or `os.PathLike`):
                Directory of the bank.
            train_dataset (`Dataset`):
                The n training rows.
            eval_dataset (`Dataset`):
                The m targets.
            recipe (`Mapping[str, Any]`, *optional*):
                Plain JSON for readers of the bank: model, data, training. A bank with another recipe is refused.

        Returns:
            [`Bank`]: the bank.

        Raises:
            ConfigMismatchError: the directory holds a bank of other rows, targets or recipe; shows both.
            TypeError, ValueError: the recipe is not plain JSON, or a dataset cannot be fingerprinted.
            StoreError: a file is damaged, or cannot be written.
        """
        content = {
            "kind": "bank",
            "rows": len(train_dataset),
            "targets": len(eval_dataset),
            "rows_fingerprint": fingerprint_dataset(train_dataset),
            "targets_fingerprint": fingerprint_dataset(eval_dataset),
            "recipe": dict(recipe or {}),
        }
        create_described(Path(directory) / BANK, content, "bank")
        return cls(directory)

    @property
    def parts(self) -> list[str]:
        """List the names of the parts, sorted."""
        return sorted(path.parent.name for path in self.directory.glob(f"*/{CONFIG}"))

    def description(self, name: str) -> dict[str, Any]:
        """Return what `retraining.json` of a part says.

        Args:
            name (`str`):
                Name of the part.

        Returns:
            `dict[str, Any]`: `name`, `rows`, `subsets`, `repeats`, `seed`, `protocol`, `repeat_of`, `removal` and
            digests.

        Raises:
            IncompleteStoreError: there is no such part.
            StoreError: the file is damaged, or belongs to another bank or part.
            ValueError: `name` is no name of a directory.
        """
        path = self.directory / safe_name(name) / CONFIG
        absent = (
            f"The bank {self.directory} has no part {name!r} (it has: {', '.join(self.parts) or 'none'}): {path} is "
            "missing. Expected one that `Bank.add_part` added."
        )
        content = read_described(path, _PART_KEYS, absent)
        if content["bank"] != content_digest(self.described) or content["rows"] != self.n_train:
            raise StoreError(
                f"{path} belongs to another bank. Expected a part of {self.directory}. Restore it from a copy."
            )
        if content["name"] != name:
            raise StoreError(
                f"{path} is that of the part {content['name']!r}. Expected {name!r}. Give its directory back its name."
            )
        if content["subsets"] < 1 or content["repeats"] < 1:
            raise StoreError(
                f"{path} says {content['subsets']} subsets and {content['repeats']} repeats. Expected at least one of "
                "each. Restore it from a copy."
            )
        return content

    def _files(self, name: str) -> RetrainingFiles:
        return RetrainingFiles(self.directory / name, self.description(name))

    def is_complete(self, name: str) -> bool:
        """Return whether all trainings of a part are done.

        Args:
            name (`str`):
                Name of the part.

        Raises:
            ValueError: `name` is no name of a directory.
        """
        return (self.directory / safe_name(name) / OUTPUTS).is_file()

    def add_part(
        self,
        name: str,
        masks: ArrayLike,
        *,
        repeats: int = 1,
        seed: int = 0,
        protocol: Mapping[str, Any] | None = None,
        repeat_of: str | None = None,
        removal: Mapping[str, Any] | None = None,
    ) -> None:
        """Add subsets to be trained on by [`Bank.build`]. If the part exists, it must be the same.

        Args:
            name (`str`):
                Name of the part, which is that of a directory.
            masks (`ArrayLike` of shape `(s, n)`):
                True where a training row belongs to the subset.
            repeats (`int`, *optional*, defaults to 1):
                R, trainings of each subset.
            seed (`int`, *optional*, defaults to 0):
                Seed from which those of the trainings follow, see [`retrain_on_subsets`].
            protocol (`Mapping[str, Any]`, *optional*):
                How is trained; [`TrainerRetraining`] has it as `protocol`. Plain JSON.
            repeat_of (`str`, *optional*):
                Another part, whose first subsets these are, and which has one repeat. Together they tell how well the
                two ways of training agree, see [`Bank.reliability`].
            removal (`Mapping[str, Any]`, *optional*):
                What was removed, for parts made of removals. Plain JSON.

        Raises:
            ConfigMismatchError: the part exists with other subsets or settings; shows both.
            ValueError: masks have the wrong shape, an empty subset, or are not those of the repeated part.
            TypeError: the protocol or the removal is not plain JSON.
            IncompleteStoreError: the part to repeat does not exist.
            StoreError: a file is damaged, or cannot be written.
        """
        member = check_masks(masks)
        if member.shape[1] != self.n_train:
            raise ValueError(
                f"`masks` has {member.shape[1]} columns; the bank has {self.n_train} training rows. Expected one "
                "column for each, and one row per subset."
            )
        if repeat_of is not None:
            self._check_repeated(repeat_of, member)
        content = {
            "name": name,
            "rows": self.n_train,
            "bank": content_digest(self.described),
            "subsets": len(member),
            "repeats": checked_int(repeats, "repeats", 1, type_error=ValueError),
            "seed": checked_int(seed, "seed", 0, type_error=ValueError),
            "protocol": dict(protocol or {}),
            "repeat_of": repeat_of,
            "removal": None if removal is None else dict(removal),
            "masks": subset_digest(member),
        }
        directory = self.directory / safe_name(name)
        create_described(directory / CONFIG, content, "part")
        if not (directory / SUBSETS).is_file():
            self._files(name).write_subsets(member)

    def _check_repeated(self, name: str, member: np.ndarray) -> None:
        original = self.description(name)
        masks = _masks(self._files(name))
        same = len(member) >= 3 and np.array_equal(masks[: len(member)], member)
        if original["repeats"] != 1 or original["repeat_of"] or not same:
            raise ValueError(
                f"`repeat_of` is {name!r}, a part of {original['subsets']} subsets with {original['repeats']} "
                f"repeat(s); `masks` has {len(member)} subsets. Expected its first subsets, at least 3, and a part "
                "that has one repeat and is itself no repeat."
            )

    def build(
        self, name: str, retrain: Retrain, *, job: int = 0, jobs: int = 1, processes: Processes | None = None
    ) -> bool:
        """Do the trainings of a part that are missing, and join the results when all are there.

        After an interruption the same call continues. Under `torchrun` or `accelerate launch` the processes divide the
        trainings. Jobs of a job array pass `job` and `jobs`, run in any order or at once, and share the directory; the
        last one joins the results.

        Args:
            name (`str`):
                Name of the part.
            retrain (`Callable`):
                The training, see [`Retrain`]. Of a [`TrainerRetraining`] the datasets and the protocol are compared
                with those of the bank.
            job (`int`, *optional*, defaults to 0):
                Number of this job, from 0.
            jobs (`int`, *optional*, defaults to 1):
                Number of jobs that divide the trainings.
            processes (`Processes`, *optional*):
                The processes of this launch. By default all of them.

        Returns:
            `bool`: whether all trainings of the part are done.

        Raises:
            IncompleteStoreError: there is no such part.
            ConfigMismatchError: `retrain` has other rows, targets or another protocol; shows both.
            ValueError: `job` is out of range, or `retrain` returns a wrong number of outputs.
            NonFiniteError: an output is NaN or infinite.
            StoreError: a file is damaged, or cannot be written.
            PeerProcessError: another process failed or died.
        """
        jobs = checked_int(jobs, "jobs", 1, type_error=ValueError)
        if checked_int(job, "job", 0, type_error=ValueError) >= jobs:
            raise ValueError(f"`job` is {job} of {jobs} jobs. Expected a number from 0 to {jobs - 1}.")
        files = self._files(name)
        part, member = files.config, _masks(files)
        if self.is_complete(name):
            return True
        self._check_training(name, part, retrain)
        wanted = all_trainings(part["subsets"], part["repeats"])
        processes = Processes(use_cpu=not torch.accelerator.is_available()) if processes is None else processes
        train_missing(files, wanted[job::jobs], member, retrain, processes, self.n_targets)

        def join() -> bool:
            if not self.is_complete(name) and not files.missing(wanted):
                files.write_outputs(member, part["repeats"])
            return self.is_complete(name)

        return processes.broadcast_from_main(join)

    def _check_training(self, name: str, part: Mapping[str, Any], retrain: Retrain) -> None:
        """Compare a [`TrainerRetraining`] with the bank; of other functions nothing is known."""
        train_dataset = getattr(retrain, "train_dataset", None)
        eval_dataset = getattr(retrain, "eval_dataset", None)
        if train_dataset is not None and eval_dataset is not None:
            self.check_rows(train_dataset, eval_dataset)
        protocol = getattr(retrain, "protocol", None)
        if protocol is not None and part["protocol"] and (lines := differing(part["protocol"], protocol)):
            raise ConfigMismatchError(
                f"The part {name!r} is trained in another way than `retrain` trains. Expected the same protocol; pass "
                "it to `add_part` of another part.\n" + "\n".join(lines)
            )

    def check_rows(self, train_dataset: Any = None, eval_dataset: Any = None) -> None:
        """Compare datasets with those that the bank was made of.

        Args:
            train_dataset (`Dataset`, *optional*):
                Training rows.
            eval_dataset (`Dataset`, *optional*):
                Targets.

        Raises:
            ConfigMismatchError: a dataset has other rows, another order of rows, or other columns; shows both.
            TypeError: a row holds a value that cannot be fingerprinted.
        """
        for dataset, key, what in ((train_dataset, "rows", "training rows"), (eval_dataset, "targets", "targets")):
            expected = self.described[f"{key}_fingerprint"]
            if dataset is not None and (found := fingerprint_dataset(dataset)) != expected:
                raise ConfigMismatchError(
                    f"The {len(dataset)} {what} have the fingerprint {found}; the bank {self.directory} was made of "
                    f"{self.described[key]} with {expected}. Expected the same rows with the same columns, in the "
                    "same order."
                )

    def part(self, name: str) -> BankPart:
        """Read a part whose trainings are all done.

        Args:
            name (`str`):
                Name of the part.

        Returns:
            [`BankPart`]: subsets, outputs and seeds.

        Raises:
            IncompleteStoreError: there is no such part, or trainings are missing.
            StoreError: a file is damaged, or belongs to another bank.
        """
        files = self._files(name)
        part, masks = files.config, _masks(files)
        shape = (part["repeats"], part["subsets"], self.n_targets)
        if not self.is_complete(name):
            raise IncompleteStoreError(
                f"The part {name!r} of the bank {self.directory} has {len(files.present())} of {shape[0] * shape[1]} "
                f"trainings. Expected all of them, joined to {files.directory / OUTPUTS}. Call `Bank.build` again, "
                "with the same arguments."
            )
        outputs, seeds = files.read_outputs(shape, part["masks"])
        return BankPart(name, masks, outputs, seeds, part["protocol"], part["repeat_of"], part["removal"])

    def reliability(
        self, name: str, resamples: int = 1000, targets: Sequence[int] | None = None
    ) -> dict[str, Reliability]:
        """Measure how well repeats of a part agree, and with it the highest score that any method could reach.

        Args:
            name (`str`):
                Name of the part.
            resamples (`int`, *optional*, defaults to 1000):
                Bootstrap samples.
            targets (`Sequence[int]`, *optional*):
                Numbers of the targets. By default all.

        Returns:
            `dict[str, Reliability]`: by the name of the part that repeats it, or its own name if it has several
            repeats itself; empty if nothing tells the noise. The ceiling of the truth that [`evaluate_bank`] uses is
            `ceiling` under its own name, and `ceiling_of_one` under others.

        Raises:
            IncompleteStoreError: trainings are missing.
            StoreError: a file is damaged.
            ImportError: scipy is not installed.
        """
        part = self.part(name)
        columns = list(range(self.n_targets) if targets is None else targets)
        found = {name: measure_reliability(part.outputs[:, :, columns], resamples)} if len(part.outputs) > 1 else {}
        for other in self.parts:
            if self.description(other)["repeat_of"] == name and self.is_complete(other):
                repeat = self.part(other)
                both = np.concatenate([part.outputs[:, : len(repeat.masks)], repeat.outputs])
                found[other] = measure_reliability(both[:, :, columns], resamples)
        return found


def _masks(files: RetrainingFiles) -> np.ndarray:
    """Read the subsets of a part, booleans `(s, n)`."""
    return files.read_subsets(files.config["subsets"], files.config["masks"])


def verify_bank(directory: Path) -> Iterator[Finding]:
    """Check `bank.json` and the directories of all parts, file by file.

    Args:
        directory: directory of the bank.

    Yields:
        One finding per file, those of trainings that are not done included. A file that is intact by itself but does
        not fit the rest of the bank is reported as damaged.
    """
    described = judged(directory / BANK, lambda: Bank(directory), "Restore it from a copy.")
    yield described
    for path in sorted(directory.glob(f"*/{CONFIG}")):
        found = {one.path: one for one in verify_retraining(path.parent)}
        if described.state == "intact" and found[path].state == "intact":
            found |= {one.path: one for one in _compared(Bank(directory), path.parent.name)}
        yield from found.values()


def _compared(bank: Bank, name: str) -> Iterator[Finding]:
    """Compare files of a part with its description, and that with the description of the bank."""
    path = bank.directory / name
    described = judged(path / CONFIG, lambda: bank.description(name), "Restore it from a copy.")
    yield described
    if described.state != "intact":
        return
    files = bank._files(name)
    shape = files.config["repeats"], files.config["subsets"], bank.n_targets
    yield judged(path / SUBSETS, lambda: _masks(files), "Restore it, or add the same part again.")
    remedy = "Delete it, if it is there; `Bank.build` with the same arguments writes it."
    yield judged(path / OUTPUTS, lambda: files.read_outputs(shape, files.config["masks"]), remedy)
    for training in [] if bank.is_complete(name) else files.missing(all_trainings(shape[1], shape[0])):
        yield Finding(files.path(training), "missing", "this training is not done", "`Bank.build` computes it.")


@dataclass(frozen=True)
class BankScore(Result):
    """The score of one method on one part of a bank.

    Attributes:
        part (`str`):
            Name of the part.
        method (`str`):
            Name of the method.
        lds (`Interval`):
            Linear datamodeling score, averaged over targets; the interval comes from resampled subsets and targets.
        difference (`Interval`, *optional*):
            This score minus that of the first method, on the same resamples; `None` for the first method.
        per_target (`np.ndarray` of shape `(m,)`):
            The score of each target.
        ceilings (`dict[str, Interval]`):
            The highest score that any method could reach, by the name of the part that repeats this one.
    """

    part: str
    method: str
    lds: Interval
    difference: Interval | None
    per_target: np.ndarray
    ceilings: dict[str, Interval]


def evaluate_bank(
    bank: Bank,
    scores: Mapping[str, ArrayLike],
    *,
    parts: Sequence[str] | None = None,
    targets: Sequence[int] | None = None,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> list[BankScore]:
    """Compute the linear datamodeling score of each method on each part of a bank.

    All methods are judged on the same bootstrap samples, so that differences between them have intervals of their own.

    Args:
        bank ([`Bank`]):
            The bank.
        scores (`Mapping[str, ArrayLike]`):
            By the name of a method, its scores of shape `(n, m)`; higher means more helpful.
        parts (`Sequence[str]`, *optional*):
            Names of the parts. By default all that are complete and neither repeats nor removals.
        targets (`Sequence[int]`, *optional*):
            Numbers of the targets that are judged. By default all.
        resamples (`int`, *optional*, defaults to 1000):
            Number of bootstrap samples.
        seed (`int`, *optional*, defaults to 0):
            Seed of the bootstrap.

    Returns:
        `list[BankScore]`: by part, then by method in the order of `scores`.

    Raises:
        ImportError: scipy is not installed.
        ValueError: scores have the wrong shape or orientation, there are none, a target does not exist, or a part has
            fewer than three subsets.
        NonFiniteError: a score is NaN or infinite.
        IncompleteStoreError: a part does not exist, trainings of it are missing, or no part is complete.
        StoreError: a file of the bank is damaged.
    """
    check_resamples(resamples)
    if not scores:
        raise ValueError("`scores` is empty. Expected at least one method. Pass scores by the name of the method.")
    checked = {name: check_scores(bank, name, values) for name, values in scores.items()}
    numbers = range(bank.n_targets) if targets is None else targets
    columns = checked_numbers(numbers, "targets", 0, bank.n_targets - 1)
    found: list[BankScore] = []
    for name in judged_parts(bank) if parts is None else parts:
        part = bank.part(name)
        kinds = bank.reliability(name, resamples, columns)
        ceilings = {other: kind.ceiling if other == name else kind.ceiling_of_one for other, kind in kinds.items()}
        first: tuple[float, np.ndarray] | None = None
        for method, values in checked.items():
            predicted, measured = predicted_and_measured(values[:, columns], part.masks, part.truth[:, columns])
            per_target = spearman(predicted, measured)
            value, means = float(per_target.mean()), resampled_lds(predicted, measured, resamples, seed)[1]
            difference = None if first is None else quantile_interval(value - first[0], means - first[1])
            first = first or (value, means)
            lds = quantile_interval(value, means)
            found.append(BankScore(name, method, lds, difference, per_target, ceilings))
    return found


def judged_parts(bank: Bank) -> list[str]:
    """Return the names of the parts that scores are judged on: complete, and neither repeats nor removals.

    Args:
        bank ([`Bank`]):
            The bank.

    Raises:
        IncompleteStoreError: there is no such part.
        StoreError: a description is damaged.
    """
    described = {name: bank.description(name) for name in bank.parts}
    chosen = [name for name, part in described.items() if not part["repeat_of"] and part["removal"] is None]
    if not (complete := [name for name in chosen if bank.is_complete(name)]):
        raise IncompleteStoreError(
            f"The bank {bank.directory} has no complete part to judge scores on; its parts are: "
            f"{', '.join(chosen) or 'none'}. Expected one whose trainings are all done. Add parts with "
            "`Bank.add_part`, and call `Bank.build`."
        )
    return complete


def check_scores(bank: Bank, name: str, scores: ArrayLike) -> np.ndarray:
    """Return scores as float64 `(n, m)`.

    Args:
        bank ([`Bank`]):
            The bank.
        name (`str`):
            Name of the method, for error messages.
        scores (`ArrayLike` of shape `(n, m)`):
            Its scores.

    Raises:
        ValueError: the shape is another one; a transposed matrix is recognized.
        NonFiniteError: a score is NaN or infinite.
    """
    try:
        values = np.asarray(scores, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise ValueError(f"The scores of {name!r} are no matrix of numbers ({error}). Expected (n, m).") from error
    expected = (bank.n_train, bank.n_targets)
    if values.shape != expected:
        hint = " They are transposed: pass `scores.T`." if values.shape == expected[::-1] else ""
        raise ValueError(
            f"The scores of {name!r} have the shape {values.shape}. Expected {expected}: the training rows and the "
            f"targets of the bank {bank.directory}.{hint}"
        )
    if not np.isfinite(values).all():
        row, column = np.argwhere(~np.isfinite(values))[0]
        raise NonFiniteError(
            f"The scores of {name!r} hold {values[row, column]} for training row {row} and target {column}. Expected "
            "finite ones."
        )
    return values
