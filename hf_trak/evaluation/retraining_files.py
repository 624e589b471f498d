"""The files of a directory of retrainings. Each one records what it is, and carries a checksum.

    <output_dir>/
      retraining.json                                number of rows, seed, and the user's settings
      trainings/subset-<i>-repeat-<r>.safetensors    outputs (m,), float64; in the metadata the subset's digest, the
                                                     numbers, the training's seed, and a digest of `retraining.json`
      retrained.arrow                                all trainings as a `datasets.Dataset`; written, never read

Directories of format 1 have no checksums. They are read and finished in their own format, with a warning;
`hf_trak.evaluation.retraining_check.upgrade_retraining` adds checksums.
"""

import hashlib
import json
import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from hf_trak.errors import ConfigMismatchError, IncompleteStoreError, StoreError
from hf_trak.store.atomic import create_bytes, differing, json_bytes, write_bytes
from hf_trak.store.sealed import SEALED_VERSION, content_digest, is_sealed, read_sealed, sealed_bytes, unsealed
from hf_trak.store.shards import METADATA_KEY, TensorSpec, parse_metadata, read_tensors, write_tensors

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
        version = content.get("format_version") if is_sealed(content) else 1
        if version not in (1, SEALED_VERSION):
            raise StoreError(
                f"{path} has format version {version!r}. Expected at most {SEALED_VERSION}, which is the newest that "
                "this version of hf_trak reads. Use the version of hf_trak that wrote it, or another directory."
            )
        if version == 1 and directory.absolute() not in _warned:
            _warned.add(directory.absolute())
            logger.warning(
                "%s is of format 1: its files have no checksums, so that damage is not noticed. `hf-trak upgrade %s` "
                "adds them.",
                directory,
                directory,
            )
        return cls(directory, config, int(version))

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
