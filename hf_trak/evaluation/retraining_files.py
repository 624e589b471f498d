"""The files of a directory of retrainings. Each one records what it is, and carries a checksum.

    <output_dir>/
      retraining.json                                number of rows, seed, and the user's settings
      trainings/subset-<i>-repeat-<r>.safetensors    outputs (m,), float64; in the metadata the subset's digest, the
                                                     numbers, the training's seed, and a digest of `retraining.json`
      retrained.arrow                                all trainings as a `datasets.Dataset`; written, never read

Directories of format 1 have no checksums. They are read and finished in their own format, with a warning;
`hf_trak.evaluation.retraining_files.upgrade_retraining` adds checksums.
"""

import hashlib
import json
import logging
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from hf_trak.errors import ConfigMismatchError, HfTrakError, IncompleteStoreError, StoreError
from hf_trak.store.atomic import create_bytes, differing, json_bytes, leftovers, write_bytes
from hf_trak.store.sealed import (
    content_digest,
    read_sealed,
    sealed_bytes,
    unsealed,
    write_sealed,
)
from hf_trak.store.shards import METADATA_KEY, Finding, TensorSpec, parse_metadata, read_tensors, write_tensors

logger = logging.getLogger(__name__)


CONFIG = "retraining.json"

_AGAIN = "Delete it, and run the same command again."

_NAME = re.compile(r"subset-(?P<subset>\d{6,})-repeat-(?P<repeat>\d{3,})\.safetensors")

_warned: set[Path] = set()


def training_seed(seed: int, subset: int, repeat: int) -> int:
    """Return the seed of one training, see `retrain_on_subsets`."""
    return (seed + repeat * 1_000_003 + subset) % 2**31


def subset_digest(mask: np.ndarray) -> str:
    """Hash a subset, booleans of shape `(n,)`, with SHA-256."""
    return hashlib.sha256(np.packbits(mask).tobytes()).hexdigest()


class RetrainingFiles:
    """The files of one directory, which the module's docstring lists.

    Attributes:
        directory: the directory.
        config: number of rows, seed, settings.
        version: format version, in which all files are written.
    """

    def __init__(self, directory: Path, config: Mapping[str, Any], version: int) -> None:
        """Use [`~RetrainingFiles.open`] or [`~RetrainingFiles.load`]."""
        self.directory = directory
        self.config = dict(config)
        self.version = version
        self._run = content_digest(config)

    @classmethod
    def open(cls, directory: Path, config: Mapping[str, Any]) -> "RetrainingFiles":
        """Open a directory of retrainings, and create it unless it exists.

        Args:
            directory: directory of the trainings.
            config: `rows`, `seed` and `settings`, plain JSON.

        Raises:
            ConfigMismatchError: the directory was made with another configuration; shows both.
            StoreError: its description is damaged.
        """
        given = json.loads(json_bytes(config))
        create_bytes(directory / CONFIG, sealed_bytes(given))
        files = cls.load(directory)
        if lines := differing(files.config, given):
            raise ConfigMismatchError(
                f"{directory / CONFIG} describes retrainings with other settings. Expected the same settings; use "
                "another directory.\n" + "\n".join(lines)
            )
        return files

    @classmethod
    def load(cls, directory: Path) -> "RetrainingFiles":
        """Open a directory that exists.

        Raises:
            IncompleteStoreError: it holds no retrainings.
            StoreError: its description is damaged.
        """
        path = directory / CONFIG
        try:
            content = read_sealed(path, f"Restore it, or delete {directory} and retrain.")
        except FileNotFoundError as error:
            raise IncompleteStoreError(
                f"{directory} holds no retrainings: {CONFIG} is missing. Expected the output directory of "
                "`retrain_on_subsets`."
            ) from error
        except OSError as error:
            raise StoreError(f"{path} cannot be read ({error}). Expected the file of a run. Restore it.") from error
        config = unsealed(content)
        if type(config.get("seed")) is not int or type(config.get("rows")) is not int:
            raise StoreError(
                f"{path} says the seed {config.get('seed')!r} and {config.get('rows')!r} rows. Expected two integers. "
                f"Restore it, or delete {directory} and retrain."
            )
        return cls(directory, config, 2)

    def path(self, subset: int, repeat: int) -> Path:
        """Path of the file of one training."""
        return self.directory / "trainings" / f"subset-{subset:06d}-repeat-{repeat:03d}.safetensors"

    def present(self) -> list[tuple[int, int]]:
        """List subset and repeat of all trainings that have a file, ordered by repeat and subset."""
        names = (_NAME.fullmatch(path.name) for path in (self.directory / "trainings").glob("*.safetensors"))
        found = [(int(name["subset"]), int(name["repeat"])) for name in names if name is not None]
        return sorted(found, key=lambda training: training[::-1])

    def write(self, subset: int, repeat: int, digest: str, outputs: np.ndarray) -> None:
        """Save the outputs of a training.

        Args:
            subset, repeat: numbers of the training.
            digest: digest of the subset, see [`subset_digest`].
            outputs: outputs on the targets, `(m,)`, float64.

        Raises:
            StoreError: the file cannot be written.
        """
        path = self.path(subset, repeat)
        if self.version == 1:
            write_bytes(path, save({"outputs": outputs}, {"subset": digest, "repeat": str(repeat)}))
            return
        write_tensors(path, {"outputs": torch.from_numpy(outputs)}, self._identity(subset, repeat, digest))

    def read(self, subset: int, repeat: int, digest: str | None) -> tuple[np.ndarray, str]:
        """Read the outputs of a training.

        Args:
            subset, repeat: numbers of the training.
            digest: digest of the subset; `None` if it is not known.

        Returns:
            The outputs, `(m,)`, float64, and the digest of the subset.

        Raises:
            ConfigMismatchError: the training is of another subset.
            StoreError: the file is missing, damaged, or that of another training.
        """
        path = self.path(subset, repeat)
        try:
            with safe_open(path, "pt") as file:
                plain, shape = file.metadata() or {}, tuple(file.get_slice("outputs").get_shape())
                old = METADATA_KEY not in plain
                identity = {} if old else parse_metadata(path, file).get("identity")
        except (SafetensorError, OSError) as error:
            raise StoreError(f"{path} is damaged ({error}). {_AGAIN}") from error
        if old and self.version > 1:
            raise StoreError(
                f"{path} is damaged, or of format 1: it has no checksum. Expected one, as {CONFIG} has. Run `hf-trak "
                f"upgrade {self.directory}` if it is of format 1; otherwise delete it, and run the same command again."
            )
        if not isinstance(identity, dict) or len(shape) != 1:
            raise StoreError(f"{path} is damaged: it holds outputs of the shape {shape} of {identity!r}. {_AGAIN}")
        specs = {"outputs": TensorSpec(shape, (torch.float64,))}
        if old:
            outputs = _read_old(path, specs["outputs"])
            said = plain.get("repeat", "")
            identity = self._identity(subset, int(said) if said.isdecimal() else -1, plain.get("subset", ""))
        else:  # check first that the file is intact, then that it is the one that was asked for
            outputs = read_tensors(path, identity, specs)["outputs"].numpy()
        found = str(identity.get("subset"))
        if digest is not None and found != digest:
            raise ConfigMismatchError(
                f"{path} belongs to a subset with the digest {found}; subset {subset} has {digest}. Expected the "
                "subsets that the directory was made with. Use another directory."
            )
        if changes := differing(identity, self._identity(subset, repeat, found)):
            raise StoreError(f"{path} is that of another training ({'; '.join(changes)}). {_AGAIN}")
        return outputs, found

    def _identity(self, subset: int, repeat: int, digest: str) -> dict[str, str | int]:
        return {
            "kind": "retraining",
            "number": subset,
            "repeat": repeat,
            "run": self._run,
            "seed": training_seed(self.config["seed"], subset, repeat),
            "subset": digest,
        }


def _read_old(path: Path, spec: TensorSpec) -> np.ndarray:
    """Read the outputs in a file of format 1."""
    try:
        with safe_open(path, "pt") as file:
            outputs = file.get_tensor("outputs")
    except (SafetensorError, OSError) as error:
        raise StoreError(f"{path} is damaged ({error}). {_AGAIN}") from error
    if outputs.dtype not in spec.dtypes or not bool(torch.isfinite(outputs).all()):
        raise StoreError(f"{path} is damaged: its outputs are {outputs.dtype}, or not finite. {_AGAIN}")
    return outputs.numpy()


DATASET = "retrained.arrow"

_TRAIN_AGAIN = "`retrain_on_subsets` with the same arguments computes it."

_UPGRADE = "`hf-trak upgrade` adds checksums."


Row = tuple[str, np.ndarray, int]

"""One training in the dataset: digest of the subset, outputs, seed."""


def verify_retraining(directory: Path) -> Iterator[Finding]:
    """Check a directory of retrainings, file by file.

    Args:
        directory: the `output_dir` of `retrain_on_subsets`.

    Returns:
        An iterator of one finding per file. Trainings that the dataset has, but that have no file, are reported as
        missing.

    Raises:
        IncompleteStoreError: there are no retrainings in this directory.
    """
    directory = Path(directory)
    path = directory / CONFIG
    try:
        files = RetrainingFiles.load(directory)
    except IncompleteStoreError:
        raise
    except StoreError as error:
        yield Finding(path, "damaged", str(error), "Restore it from a copy, or retrain into another directory.")
        return
    old = files.version == 1
    yield Finding(path, "unchecked" if old else "intact", "it has no checksum" * old, _UPGRADE * old)
    table, problem = _read_dataset(directory / DATASET)
    present = set(files.present())
    expected = present | set(table or {})
    differ = []
    for training in sorted(expected, key=lambda one: one[::-1]):
        file = files.path(*training)
        if training not in present:
            yield Finding(file, "missing", "this training is not done", _TRAIN_AGAIN)
            continue
        try:
            outputs, digest = files.read(*training, None)
        except HfTrakError as error:
            yield Finding(file, "damaged", str(error), f"Delete it; then: {_AGAIN}")
            continue
        row = (table or {}).get(training)
        if row is not None and not _same(row, digest, outputs, training_seed(files.config["seed"], *training)):
            differ.append(training)
        yield Finding(file, "unchecked" if old else "intact", "it has no checksum" * old, _UPGRADE * old)
    if problem is None and differ:
        problem = f"its rows of the trainings (subset, repeat) {differ[:5]} are not those in {files.path(*differ[0])}"
    if problem is not None:
        yield Finding(directory / DATASET, "damaged", problem, "`retrain_on_subsets` writes it anew at every call.")
    elif table is not None:
        yield Finding(directory / DATASET, "intact")
    for one in leftovers(directory):
        yield Finding(one.path, "leftover", f"{one.size} bytes", "`hf-trak clean` removes it.")


def upgrade_retraining(directory: Path) -> None:
    """Add checksums to a directory of format 1. After an interruption the same call continues.

    Every training is first read and compared with the dataset of all trainings, which an undamaged directory has. A
    directory of the current format is left as it is.

    Args:
        directory: the `output_dir` of `retrain_on_subsets`.

    Raises:
        IncompleteStoreError: there are no retrainings in this directory.
        StoreError: a file is damaged; the directory is left as it was.
    """
    directory = Path(directory)
    files = RetrainingFiles.load(directory)
    current = RetrainingFiles(directory, files.config, 2)
    old = RetrainingFiles(directory, files.config, 1)
    table, problem = _read_dataset(directory / DATASET)
    if problem is not None:
        raise StoreError(
            f"{directory / DATASET} {problem}. Expected the results of all trainings, to compare with. Call "
            "`retrain_on_subsets` with the same arguments, which writes it anew, and upgrade again."
        )
    found = {training: old.read(*training, None) for training in old.present()}
    for training, (outputs, digest) in found.items():
        row = (table or {}).get(training)
        if row is not None and not _same(row, digest, outputs, training_seed(files.config["seed"], *training)):
            raise StoreError(
                f"{old.path(*training)} and {directory / DATASET} hold different results of training {training}, so "
                "that one of them is damaged. Expected the same in both. Restore the damaged one, or delete the file "
                "of the training and call `retrain_on_subsets` with the same arguments."
            )
    for training, (outputs, digest) in found.items():
        current.write(*training, digest, outputs)
    if files.version == 1:  # last, because it states that all other files have checksums
        write_sealed(directory / CONFIG, files.config)


def _read_dataset(path: Path) -> tuple[dict[tuple[int, int], Row] | None, str | None]:
    """Read the rows of the dataset by subset and repeat (`None` if there is none), and say what is wrong with it."""
    if not path.exists():
        return None, None
    try:
        with pa.OSFile(str(path)) as file:
            table = pa.ipc.open_stream(file).read_all()
        table.validate(full=True)
        columns = [table.column(name).to_pylist() for name in ("subset", "repeat", "seed", "mask", "outputs")]
    except (pa.ArrowException, OSError, ValueError, KeyError) as error:
        return None, f"cannot be read ({error})"
    rows: dict[tuple[int, int], Row] = {}
    for subset, repeat, seed, mask, outputs in zip(*columns, strict=True):
        if not all(isinstance(value, int) for value in (subset, repeat, seed)) or mask is None or outputs is None:
            return None, "has rows without values"
        rows[subset, repeat] = (subset_digest(np.array(mask, dtype=bool)), np.array(outputs, dtype=float), seed)
    return rows, None


def _same(row: Row, digest: str, outputs: np.ndarray, seed: int) -> bool:
    return row[0] == digest and row[2] == seed and np.array_equal(row[1], outputs)
