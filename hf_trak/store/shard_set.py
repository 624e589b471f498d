"""One feature matrix on disk: the shards that hold its rows. Some may not be written yet."""

import hashlib
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hf_trak.errors import IncompleteStoreError, NonFiniteError, StoreError
from hf_trak.runtime.checks import check_finite_rows
from hf_trak.store.codes import CodedRows, CodeFormat, Rotation
from hf_trak.store.sealed import Finding, judged
from hf_trak.store.shards import Identity, ShardPlan, TensorSpec, read_header, read_part, read_tensors, write_tensors

UNDERFLOW_TOLERANCE = 0.01
"""Relative change of a row, in norm, beyond which casting it to the storage dtype is reported."""

_CAST_ROWS = 256


@dataclass(frozen=True)
class Shard:
    """Rows `start … stop − 1` of a feature matrix.

    Attributes:
        start: number of the first row.
        stop: one past the number of the last row.
        features: projected gradients `(rows, k)`, in the storage dtype, or their codes.
        out_to_loss: derivatives of the loss by the model output `(rows,)`, float32.
    """

    start: int
    stop: int
    features: Tensor | CodedRows
    out_to_loss: Tensor

    @property
    def grads(self) -> Tensor:
        """Return the projected gradients `(rows, k)` in the storage dtype. Codes are decoded to float32 whenever this
        is read."""
        return self.features.decode() if isinstance(self.features, CodedRows) else self.features

    @property
    def coded(self) -> CodedRows | None:
        """Return the codes, or `None` for floating-point features."""
        return self.features if isinstance(self.features, CodedRows) else None

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors of the file of the shard, by name."""
        features = {"grads": self.features} if isinstance(self.features, Tensor) else self.features.tensors()
        return {**features, "out_to_loss": self.out_to_loss}

    def rows(self, first: int, last: int) -> "Shard":
        """Take the rows `first … last − 1`, counted from the first row of the shard."""
        part = slice(first, last)
        return Shard(self.start + first, self.start + last, self.features[part], self.out_to_loss[part])


@dataclass(eq=False)
class ShardSet:
    """The shards of one feature matrix `(n_rows, k)`. Some may not be written yet.

    Attributes:
        directory: directory of the files.
        prefix: first part of their names.
        plan: the division of rows into shards.
        width: number of columns, k.
        dtype: storage dtype of `grads`.
        identity: what the rows are computed from, see `hf_trak.store.shards`.
        rotation: rotates every row before it is written; `None` leaves rows as they are.
        code_format: form of the codes in which rows are kept; `None` keeps floating-point numbers.
    """

    directory: Path
    prefix: str
    plan: ShardPlan
    width: int
    dtype: torch.dtype
    identity: Identity
    rotation: Rotation | None = None
    code_format: CodeFormat | None = None
    _warned: bool = field(default=False, init=False, repr=False)

    @property
    def arguments(self) -> dict[str, Any]:
        """Return the arguments of the constructor by name, for another set of shards of the same features."""
        return {one.name: getattr(self, one.name) for one in fields(ShardSet) if one.init}

    def __len__(self) -> int:
        """Return the number of shards, written or not."""
        return len(self.plan)

    def path(self, index: int) -> Path:
        """Return the path of the file of a shard."""
        return self.directory / self.plan.file_name(index, self.prefix)

    def is_written(self, index: int) -> bool:
        """Tell whether a shard is written. Its header is checked, its tensors are not read.

        Raises:
            StoreError: the file is truncated or does not belong here.
        """
        if not self.exists(index):
            return False
        self.header(index)
        return True

    def exists(self, index: int) -> bool:
        """Tell whether the file of a shard exists, whatever it contains. [`~ShardSet.read`] checks that."""
        return self.path(index).exists()

    def unwritten(self) -> list[int]:
        """List the indices of the shards that are not written yet; see [`~ShardSet.is_written`].

        Raises:
            StoreError: a file that exists is truncated or does not belong here.
        """
        return [index for index in range(len(self.plan)) if not self.is_written(index)]

    def require_complete(self, remedy: str) -> None:
        """Check that every shard is written.

        Args:
            remedy: a sentence about what to do, for the error message.

        Raises:
            IncompleteStoreError: shards are missing; names the first rows of them.
            StoreError: see [`~ShardSet.unwritten`].
        """
        absent = self.unwritten()
        if absent:
            rows = ", ".join(f"{self.plan.rows(i).start}–{self.plan.rows(i).stop - 1}" for i in absent[:4])
            raise IncompleteStoreError(
                f"{self.directory} lacks {len(absent)} of {len(self.plan)} `{self.prefix}` shards (rows {rows}"
                f"{', …' if len(absent) > 4 else ''}). Expected all rows 0–{self.plan.n_rows - 1}. {remedy}"
            )

    @property
    def content_hash(self) -> str:
        """Hash the checksums of all shards, 32 hex digits.

        Raises:
            StoreError: a shard is missing or invalid.
        """
        return content_hash(self.checksums())

    def checksums(self) -> list[str]:
        """Read the checksum of every shard from its header. Raises as [`~ShardSet.content_hash`]."""
        return [str(self.header(index)["checksum"]) for index in range(len(self.plan))]

    def write(self, index: int, grads: Tensor, out_to_loss: Tensor) -> Path:
        """Write one shard.

        Args:
            index: index of the shard.
            grads: projected gradients `(rows, k)` in any floating dtype, on any device. They are rotated and encoded
                here, if the store keeps codes.
            out_to_loss: derivatives of the loss by the model output, `(rows,)`.

        Returns:
            The path of the file.

        Raises:
            ValueError: the shapes do not fit the plan.
            NonFiniteError: a value is NaN or infinite, or becomes so in the storage dtype; names the row.
            StoreError: the file cannot be written.
        """
        rows = self.plan.rows(index)
        expected = (len(rows), self.width)
        if tuple(grads.shape) != expected or tuple(out_to_loss.shape) != expected[:1]:
            raise ValueError(
                f"Shard {index} of {self.directory} was given `grads` of shape {tuple(grads.shape)} and `out_to_loss` "
                f"of shape {tuple(out_to_loss.shape)}. Expected {expected} and {expected[:1]} for rows "
                f"{rows.start}–{rows.stop - 1}."
            )
        tensors = self._to_storage(grads.detach(), rows)
        check_finite_rows(out_to_loss, "output-to-loss gradient", rows, unit="sample")
        tensors["out_to_loss"] = out_to_loss.detach().to(torch.float32)
        write_tensors(self.path(index), tensors, self.identity, start=rows.start, stop=rows.stop)
        return self.path(index)

    def read(self, index: int, verify: bool | None = None, mapped: bool = True) -> Shard:
        """Read one shard.

        Args:
            index: index of the shard.
            verify: whether to compare the checksum; by default this is done on the first read by this process.
            mapped: whether to memory-map its tensors, so that a slice reads only its own rows; otherwise the whole
                file is read, see [`~hf_trak.store.shards.read_tensors`].

        Raises:
            StoreError: the file is missing, truncated or damaged, or does not belong here.
        """
        rows, specs = self.plan.rows(index), self._specs(index)
        tensors = read_tensors(
            self.path(index), self.identity, specs, verify, mapped, start=rows.start, stop=rows.stop
        )
        return Shard(rows.start, rows.stop, self._features(tensors), tensors["out_to_loss"])

    def prefix_of(self, index: int, count: int) -> Shard:
        """Read the first bytes of the codes of every row of one shard, and nothing of the rest.

        Args:
            index: index of the shard.
            count: bytes per row: those of the first 1, 2, … blocks, see [`CodeFormat.prefixes`]. More than there are
                stand for all, and fewer are rounded down to whole blocks.

        Returns:
            The rows of the shard with the first blocks of their codes.

        Raises:
            ValueError: the features are not codes, or not even the first block fits.
            StoreError: the file is missing, truncated or damaged in what is read, or does not belong here.
        """
        return self._read_named(self.path(index), index, self.names_within(count))

    def _read_named(self, path: Path, index: int, names: Sequence[str]) -> Shard:
        """Read some tensors of one shard from a file that has them."""
        rows, specs = self.plan.rows(index), self._specs(index, names)
        tensors = read_part(path, self.identity, specs, start=rows.start, stop=rows.stop)
        return Shard(rows.start, rows.stop, self._features(tensors), tensors["out_to_loss"])

    def names_within(self, count: int) -> tuple[str, ...]:
        """Name the tensors that the first `count` bytes of every row are in: `out_to_loss`, `scale` and blocks.

        Raises:
            ValueError: the features are not codes, or not even the first block fits.
        """
        form = self.code_format
        if form is None:
            raise ValueError(
                f"The features in {self.directory} are {self.dtype}, whose first bytes say nothing of a row. Expected "
                "codes. Convert the store with `hf-trak convert --feature_dtype int2`."
            )
        names = [name for name, end in zip(form.names, form.prefixes, strict=True) if end <= count]
        if not names:
            raise ValueError(
                f"The first {count} bytes of a row are less than the first block of its codes, {form.prefixes[0]} "
                f"bytes. Expected one of {form.prefixes}."
            )
        return ("out_to_loss", "scale", *names)

    def rows_of(self, wanted: Mapping[int, Sequence[int]]) -> Iterator[tuple[int, Tensor | CodedRows, Tensor]]:
        """Read single rows of some shards.

        Args:
            wanted: by index of a shard, the rows, counted from its first one.

        Yields:
            The index of each shard, ascending, the features of its wanted rows, and their weights q.

        Raises:
            StoreError: see [`~ShardSet.read`].
        """
        for index in sorted(wanted):
            shard, places = self.read(index), torch.tensor(list(wanted[index]), dtype=torch.int64)
            yield index, shard.features[places], shard.out_to_loss[places]

    def _features(self, tensors: Mapping[str, Tensor]) -> Tensor | CodedRows:
        """Take the features out of the tensors of a file."""
        if self.code_format is None:
            return tensors["grads"]
        return CodedRows.of_tensors(tensors, self.code_format)

    def __iter__(self) -> Iterator[Shard]:
        """Iterate over all shards in order. Raises as [`~ShardSet.read`]."""
        return self.part(range(len(self.plan)))

    def part(self, indices: Sequence[int], mapped: bool = True) -> Iterator[Shard]:
        """Iterate over some shards, reading each one when it is asked for. Raises as [`~ShardSet.read`]."""
        return (self.read(index, mapped=mapped) for index in indices)

    def findings(self, remedy: str) -> Iterator[Finding]:
        """Read every shard, and compare its bytes with its checksum.

        Args:
            remedy: a sentence that says what computes missing shards.

        Returns:
            An iterator of one finding per shard.
        """
        for index in range(len(self.plan)):
            rows, path = self.plan.rows(index), self.path(index)
            if self.exists(index):
                yield judged(path, partial(self._check_values, index), f"Delete it; then: {remedy}")
            else:
                yield Finding(path, "missing", f"rows {rows.start} to {rows.stop - 1} are not computed", remedy)

    def _check_values(self, index: int) -> None:
        check_values(self.read(index, verify=True), self.path(index))

    def _specs(self, index: int, names: Sequence[str] | None = None) -> dict[str, TensorSpec]:
        """Return the tensors of a shard, or those of some names."""
        count, form = len(self.plan.rows(index)), self.code_format
        numbers = TensorSpec((count,), (torch.float32,))
        if form is None:
            return {"grads": TensorSpec((count, self.width), (self.dtype,)), "out_to_loss": numbers}
        blocks = zip(form.names, form.block_bytes, strict=True)
        codes = {name: TensorSpec((count, size), (torch.uint8,)) for name, size in blocks}
        specs = {"out_to_loss": numbers, "scale": numbers, **codes}
        return specs if names is None else {name: specs[name] for name in names}

    def header(self, index: int) -> dict[str, Any]:
        """Read and check the metadata of a shard; its tensors are not read.

        Raises:
            StoreError: the file is missing or truncated, or does not belong here.
        """
        rows = self.plan.rows(index)
        return read_header(self.path(index), self.identity, self._specs(index), start=rows.start, stop=rows.stop)

    def kept(self, grads: Tensor) -> Tensor:
        """Return what is read back after rows of features were written: rotated and rounded as this matrix keeps them.

        Args:
            grads: projected gradients `(rows, k)`, in any floating dtype, finite.

        Returns:
            `(rows, k)`, float32.
        """
        tensors = self._to_storage(grads.detach(), range(len(grads)))
        features = self._features(tensors)
        return features.decode() if isinstance(features, CodedRows) else features.float()

    def _to_storage(self, grads: Tensor, rows: range) -> dict[str, Tensor]:
        """Turn features into the tensors that are written."""
        check_finite_rows(grads, "projected gradient", rows, unit="sample")
        if self.rotation is not None:
            grads = self.rotation.apply(grads)
            check_finite_rows(grads, "rotated projected gradient", rows, unit="sample")
        if self.code_format is not None:
            coded = CodedRows.encode(grads, self.code_format)
            check_finite_rows(coded.scale, "scale of the codes", rows, unit="sample")
            return coded.tensors()
        stored, worst = cast_rows(grads, self.dtype, rows, "projected gradient")
        if worst > UNDERFLOW_TOLERANCE and not self._warned:
            self._warned = True
            warnings.warn(
                f"Storing features as {self.dtype} changes a row by {100 * worst:.1f} % of its norm, because its "
                "values fall below the smallest that the dtype can hold. Store them as float32 instead.",
                stacklevel=4,
            )
        return {"grads": stored}


def check_values(shard: Shard, path: Path) -> None:
    """Check that a shard holds values that are written.

    Raises:
        NonFiniteError: a feature or a weight q is NaN or infinite; names the row.
        StoreError: codes are none that an encoder writes.
    """
    rows = range(shard.start, shard.stop)
    if shard.coded is None:
        check_finite_rows(shard.grads, "projected gradient", rows, unit="sample")
    elif problem := shard.coded.problem():
        raise StoreError(f"{path} cannot be used: {problem}. Delete this file and run the same command again.")
    check_finite_rows(shard.out_to_loss, "output-to-loss gradient", rows, unit="sample")


def content_hash(checksums: Sequence[str]) -> str:
    """Hash the checksums of all shards of a feature matrix, in their order. 32 hex digits."""
    return hashlib.sha256("".join(checksums).encode()).hexdigest()[:32]


def cast_rows(grads: Tensor, dtype: torch.dtype, rows: Sequence[int], what: str) -> tuple[Tensor, float]:
    """Cast finite rows to the storage dtype.

    Args:
        grads: `(rows, k)`, finite.
        dtype: the storage dtype.
        rows: numbers of the rows, for the error message.
        what: what a row is, for the error message.

    Returns:
        The cast `(rows, k)` tensor, and the largest relative change ‖cast(x) − x‖ / ‖x‖ of any row.

    Raises:
        NonFiniteError: a value is too large for the dtype; names the row.
    """
    stored = grads.to(dtype)
    if stored.dtype == grads.dtype:
        return stored, 0.0
    finite = torch.isfinite(stored).all(dim=1)
    if not bool(finite.all()):
        first = int(torch.nonzero(~finite)[0])
        raise NonFiniteError(
            f"The {what} of sample {rows[first]} has the magnitude {grads[first].abs().max().item():.3g}, "
            f"too large for {dtype}. Expected at most {torch.finfo(dtype).max:.3g}. Store the features as float32."
        )
    worst = 0.0
    for before, after in zip(grads.split(_CAST_ROWS), stored.split(_CAST_ROWS), strict=True):
        exact = before.to(torch.float64)  # squares of what fp16 cannot hold may vanish in fp32 too
        norms = exact.norm(dim=1)
        change = (after.to(torch.float64) - exact).norm(dim=1)
        worst = max(worst, float(torch.where(norms > 0, change / norms, 0.0).max()))
    return stored, worst
