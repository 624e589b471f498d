"""The files of a directory of retrainings. A part of a bank is such a directory, too.

    <output_dir>/
      retraining.json           number of rows, seed, and what else tells these retrainings from others
      trainings/subset-<i>-repeat-<r>.safetensors    outputs (m,), float64, of one training
      subsets.safetensors       subsets (s, ⌈n/8⌉), bits in uint8
      outputs.safetensors       outputs (R, s, m), float64, and seeds (R, s), int64, of all trainings

Each file records what it is, and carries a checksum: the metadata has a digest of `retraining.json`, and that of the
subset or of all subsets. The last file is written when all trainings are done.
"""

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from hf_trak.errors import ConfigMismatchError, IncompleteStoreError, StoreError
from hf_trak.store.atomic import differing, leftovers, plain_json
from hf_trak.store.sealed import Finding, content_digest, create_sealed, read_sealed, unsealed
from hf_trak.store.shards import TensorSpec, check_file, parse_metadata, read_tensors, write_tensors
from hf_trak.store.verification import judged

CONFIG = "retraining.json"

SUBSETS = "subsets.safetensors"

OUTPUTS = "outputs.safetensors"

Training = tuple[int, int]

"""The number of a subset, and that of a repeat."""

_AGAIN = "Delete it, and run the same command again."

_NAME = re.compile(r"subset-(?P<subset>\d{6,})-repeat-(?P<repeat>\d{3,})\.safetensors")


def training_seed(seed: int, subset: int, repeat: int) -> int:
    """Return the seed of one training, see `retrain_on_subsets`."""
    return (seed + repeat * 1_000_003 + subset) % 2**31


def subset_digest(mask: np.ndarray) -> str:
    """Hash a subset, booleans of shape `(n,)`, or all subsets `(s, n)`, with SHA-256."""
    return hashlib.sha256(np.packbits(mask).tobytes()).hexdigest()


def all_trainings(subsets: int, repeats: int) -> list[Training]:
    """List all trainings, ordered by repeat and subset."""
    return [(subset, repeat) for repeat in range(repeats) for subset in range(subsets)]


def create_described(path: Path, content: Mapping[str, Any], what: str) -> None:
    """Create a description unless it exists, in which case it must say the same.

    Args:
        path: the file.
        content: plain JSON.
        what: what is described, for the error message.

    Raises:
        ConfigMismatchError: the file says something else; shows both.
        StoreError: the file is damaged, or cannot be written.
        TypeError, ValueError: the content is not plain JSON.
    """
    create_sealed(path, content)
    if lines := differing(read_described(path, {}, ""), plain_json(content)):
        raise ConfigMismatchError(
            f"{path} describes another {what}. Expected the same rows, targets, subsets and settings; use another "
            "directory or another name.\n" + "\n".join(lines)
        )


def read_described(path: Path, keys: Mapping[str, type], absent: str) -> dict[str, Any]:
    """Read a description.

    Args:
        path: the file.
        keys: the keys that it must have, with their types.
        absent: what to say if there is no such file.

    Raises:
        IncompleteStoreError: the file does not exist.
        StoreError: it is damaged, of another version, or lacks a key.
    """
    try:
        content = unsealed(read_sealed(path))
    except FileNotFoundError as error:
        raise IncompleteStoreError(absent) from error
    except OSError as error:
        raise StoreError(f"{path} cannot be read ({error}). Expected a file of hf_trak. Restore it.") from error
    if wrong := [name for name, kind in keys.items() if type(content.get(name)) is not kind]:
        raise StoreError(
            f"{path} has no valid {', '.join(wrong)}. Expected the file as hf_trak wrote it. Restore it from a copy, "
            "or use the version of hf_trak that wrote it."
        )
    return content


class RetrainingFiles:
    """The files of one directory, which the module's docstring lists.

    Attributes:
        directory: the directory.
        config: what `retraining.json` says, `rows` and `seed` at least.
    """

    def __init__(self, directory: Path, config: Mapping[str, Any]) -> None:
        """
        Args:
            directory: the directory.
            config: what `retraining.json` says; [`~RetrainingFiles.load`] reads it.
        """
        self.directory = directory
        self.config = dict(config)
        self._run = content_digest(config)

    @classmethod
    def load(cls, directory: Path) -> "RetrainingFiles":
        """Open a directory that exists.

        Raises:
            IncompleteStoreError: it holds no retrainings.
            StoreError: its description is damaged.
        """
        absent = (
            f"{directory} holds no retrainings: {CONFIG} is missing. Expected the output directory of "
            "`retrain_on_subsets`."
        )
        return cls(directory, read_described(directory / CONFIG, {"rows": int, "seed": int}, absent))

    def path(self, training: Training) -> Path:
        """Return the path of the file of one training."""
        return self.directory / "trainings" / f"subset-{training[0]:06d}-repeat-{training[1]:03d}.safetensors"

    def seed(self, training: Training) -> int:
        """Return the seed of one training."""
        return training_seed(self.config["seed"], *training)

    def present(self) -> list[Training]:
        """List all trainings that have a file, ordered by repeat and subset."""
        names = (_NAME.fullmatch(path.name) for path in (self.directory / "trainings").glob("*.safetensors"))
        found = [(int(name["subset"]), int(name["repeat"])) for name in names if name is not None]
        return sorted(found, key=lambda training: training[::-1])

    def missing(self, wanted: Sequence[Training]) -> list[Training]:
        """List those of some trainings that have no file."""
        return [training for training in wanted if not self.path(training).is_file()]

    def write(self, training: Training, mask: np.ndarray, outputs: np.ndarray) -> None:
        """Save the outputs of a training.

        Args:
            training: its numbers.
            mask: the subset, `(n,)`.
            outputs: outputs on the targets, `(m,)`, float64.

        Raises:
            StoreError: the file cannot be written.
        """
        tensors = {"outputs": torch.from_numpy(outputs)}
        write_tensors(self.path(training), tensors, self._identity(training, subset_digest(mask)))

    def read(self, training: Training, mask: np.ndarray | None) -> np.ndarray:
        """Read the outputs of a training.

        Args:
            training: its numbers.
            mask: the subset, `(n,)`; `None` if it is not known.

        Returns:
            The outputs, `(m,)`, float64.

        Raises:
            ConfigMismatchError: the training is of another subset.
            StoreError: the file is missing, damaged, or that of another training.
        """
        path = self.path(training)
        identity, shape = _said(path, "outputs")
        if len(shape) != 1:
            raise StoreError(f"{path} is damaged: it holds outputs of the shape {shape} of {identity!r}. {_AGAIN}")
        # check first that the file is intact, then that it is the one that was asked for
        outputs = read_tensors(path, identity, {"outputs": TensorSpec(shape, (torch.float64,))})["outputs"].numpy()
        found, digest = identity.get("subset"), None if mask is None else subset_digest(mask)
        if digest is not None and found != digest:
            raise ConfigMismatchError(
                f"{path} belongs to a subset with the digest {found}; subset {training[0]} has {digest}. Expected the "
                "subsets that the directory was made with. Use another directory."
            )
        if changes := differing(identity, self._identity(training, str(found))):
            raise StoreError(f"{path} is that of another training ({'; '.join(changes)}). {_AGAIN}")
        return outputs

    def write_subsets(self, masks: np.ndarray) -> None:
        """Write the subsets, booleans `(s, n)`.

        Raises:
            StoreError: the file cannot be written.
        """
        packed = torch.from_numpy(np.packbits(masks, axis=1))
        write_tensors(self.directory / SUBSETS, {"subsets": packed}, self._joined("subsets", subset_digest(masks)))

    def read_subsets(self, count: int, digest: str) -> np.ndarray:
        """Read the subsets.

        Args:
            count: s.
            digest: digest of all subsets, see [`subset_digest`].

        Returns:
            Booleans `(s, n)`.

        Raises:
            StoreError: the file is missing or damaged, or belongs to other retrainings.
        """
        path, rows = self.directory / SUBSETS, self.config["rows"]
        specs = {"subsets": TensorSpec((count, -(-rows // 8)), (torch.uint8,))}
        packed = read_tensors(path, self._joined("subsets", digest), specs)["subsets"].numpy()
        masks = np.unpackbits(packed, axis=1, count=rows).astype(bool)
        if subset_digest(masks) != digest:
            raise StoreError(
                f"{path} holds other subsets than {CONFIG} says. Expected those that the trainings were made with. "
                "Restore both from a copy."
            )
        return masks

    def write_outputs(self, masks: np.ndarray, repeats: int) -> int:
        """Join the trainings of all subsets `(s, n)` to one file.

        Returns:
            The number of targets, m.

        Raises:
            ConfigMismatchError: a training is of another subset.
            StoreError: a training is missing or damaged, or the file cannot be written.
            ValueError: trainings have different numbers of outputs.
        """
        wanted = all_trainings(len(masks), repeats)
        found = [self.read(training, masks[training[0]]) for training in wanted]
        if len(counts := sorted({len(values) for values in found})) > 1:
            raise ValueError(
                f"Trainings have {counts} outputs. Expected one number of targets: `retrain` must return all of them, "
                "in the same order, every time."
            )
        tensors = {
            "outputs": torch.from_numpy(np.stack(found)).reshape(repeats, len(masks), -1),
            "seeds": torch.tensor([self.seed(training) for training in wanted]).reshape(repeats, -1),
        }
        write_tensors(self.directory / OUTPUTS, tensors, self._joined("outputs", subset_digest(masks)))
        return counts[0]

    def read_outputs(self, shape: tuple[int, int, int], digest: str) -> tuple[np.ndarray, np.ndarray]:
        """Read the outputs of all trainings.

        Args:
            shape: R, s and m.
            digest: digest of all subsets, see [`subset_digest`].

        Returns:
            Outputs `(R, s, m)`, float64, and seeds `(R, s)`, int64.

        Raises:
            StoreError: the file is missing or damaged, or belongs to other retrainings; an output is NaN or infinite.
        """
        path = self.directory / OUTPUTS
        specs = {"outputs": TensorSpec(shape, (torch.float64,)), "seeds": TensorSpec(shape[:2], (torch.int64,))}
        found = read_tensors(path, self._joined("outputs", digest), specs)
        outputs = found["outputs"].numpy()
        if not np.isfinite(outputs).all():
            raise StoreError(f"{path} holds NaN or infinite outputs. Expected finite ones. Restore it from a copy.")
        return outputs, found["seeds"].numpy()

    def check_joined(self, name: str) -> tuple[tuple[int, ...], str]:
        """Check the file of all subsets or of all outputs.

        Args:
            name: `"subsets"` or `"outputs"`.

        Returns:
            The shape of the tensor of this name, and the digest of all subsets.

        Raises:
            StoreError: the file is missing or damaged, or belongs to other retrainings.
        """
        path = self.directory / f"{name}.safetensors"
        check_file(path)
        identity, shape = _said(path, name)
        if changes := differing(identity, self._joined(name, str(identity.get("masks")))):
            raise StoreError(f"{path} belongs to other retrainings ({'; '.join(changes)}). {_AGAIN}")
        return shape, identity["masks"]

    def _identity(self, training: Training, digest: str) -> dict[str, str | int]:
        return {
            "kind": "retraining",
            "number": training[0],
            "repeat": training[1],
            "run": self._run,
            "seed": self.seed(training),
            "subset": digest,
        }

    def _joined(self, name: str, masks: str) -> dict[str, str | int]:
        return {"kind": f"retraining {name}", "run": self._run, "masks": masks}


def _said(path: Path, name: str) -> tuple[dict[str, Any], tuple[int, ...]]:
    """Return the identity that a file says, unchecked, and the shape of one of its tensors."""
    try:
        with safe_open(path, "pt") as file:
            identity, shape = parse_metadata(path, file).get("identity"), tuple(file.get_slice(name).get_shape())
    except (SafetensorError, OSError) as error:
        raise StoreError(f"{path} is damaged ({error}). {_AGAIN}") from error
    if not isinstance(identity, dict):
        raise StoreError(f"{path} is damaged: its metadata has the identity {identity!r}. {_AGAIN}")
    return identity, shape


def verify_retraining(directory: Path) -> Iterator[Finding]:
    """Check a directory of retrainings, file by file.

    Args:
        directory: the `output_dir` of `retrain_on_subsets`, or a part of a bank.

    Returns:
        An iterator of one finding per file. Trainings that all outputs have, but that have no file, are reported as
        missing, unless the directory has no trainings at all as that of a published bank.

    Raises:
        IncompleteStoreError: there are no retrainings in this directory.
    """
    directory = Path(directory)
    try:
        files = RetrainingFiles.load(directory)
    except IncompleteStoreError:
        raise
    except StoreError as error:
        yield Finding(directory / CONFIG, "damaged", str(error), "Restore it from a copy, or retrain elsewhere.")
        return
    yield Finding(directory / CONFIG, "intact")
    present, digests = files.present(), set()
    expected, masks = set(present), None
    for path in filter(Path.is_file, (directory / SUBSETS, directory / OUTPUTS)):
        try:
            shape, digest = files.check_joined(path.stem)
            digests.add(digest)
            if len(digests) > 1:
                raise StoreError(f"{path} belongs to other subsets than {directory / SUBSETS}.")
            if path.name == SUBSETS:
                masks = files.read_subsets(shape[0], digest)
            elif present:
                expected |= set(all_trainings(shape[1], shape[0]))
        except StoreError as error:
            yield Finding(path, "damaged", str(error), "Delete it; the same call or build writes it anew.")
        else:
            yield Finding(path, "intact")
    for training in sorted(expected, key=lambda one: one[::-1]):
        path = files.path(training)
        if training not in present:
            remedy = "`retrain_on_subsets` with the same arguments computes it."
            yield Finding(path, "missing", "this training is not done", remedy)
            continue
        mask = masks[training[0]] if masks is not None and training[0] < len(masks) else None
        yield judged(path, partial(files.read, training, mask), f"Delete it; then: {_AGAIN}")
    for one in leftovers(directory):
        yield Finding(one.path, "leftover", f"{one.size} bytes", "`hf-trak inspect --clean` removes it.")
