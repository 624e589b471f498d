"""Shards whose rows arrive one by one, in any order. Each is a memory-mapped file until its last row has arrived.

An unfinished shard `train-00000-of-00003.safetensors` is the file `train-00000-of-00003.partial`:

| bytes | |
|---|---|
| a multiple of 4096 | JSON, padded with spaces: which rows these are, of which run, their dtype and width |
| rows · 8 | for each row the xxh3-64 of its values, 0 while it is missing |
| rows · k · itemsize | `grads` |
| rows · 4 | `out_to_loss`, float32 |

The hash of a row is written after its values, and a row counts as present only if its hash is right. So a killed
process, or a machine that went down before all pages were on disk, leaves no half-written row.
"""

import json
import mmap
import os
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import xxhash
from torch import Tensor

from hf_trak.errors import IncompleteStoreError, StoreError
from hf_trak.store.atomic import allocate, create_file, explained
from hf_trak.store.shard_set import ShardSet

_BLOCK = 4096
_OPEN_FILES = 64
"""Number of unfinished shards that are kept open. Rows that arrive in random order touch all shards in turn."""


class PartialShard:
    """The memory-mapped file of one unfinished shard."""

    def __init__(self, shards: ShardSet, index: int, mode: Literal["r", "r+"] = "r+") -> None:
        """Open the file. Create it if it does not exist, and mark damaged rows as missing.

        Args:
            shards: all shards of the feature matrix.
            index: number of this shard.
            mode: `r+`, or `r` to leave the file as it is, damaged rows included.

        Raises:
            StoreError: the file is truncated, or belongs to another run.
        """
        self.path = shards.path(index).with_suffix(".partial")
        rows = shards.plan.rows(index)
        count, width = len(rows), shards.width
        dtype = np.dtype({torch.float16: "float16", torch.float32: "float32"}[shards.dtype])
        header = self._header(shards, rows)
        sizes = [len(header), 8 * count, count * width * dtype.itemsize, 4 * count]
        ends = np.cumsum(sizes)

        def fill(temporary: Path) -> None:
            with open(temporary, "wb") as file:
                file.write(header)
                allocate(file, int(ends[-1]))

        if mode == "r+" and not self.path.exists():
            create_file(self.path, fill)
        with explained(self.path), open(self.path, "rb" if mode == "r" else "r+b") as file:
            found = os.fstat(file.fileno()).st_size
            if found != ends[-1] or file.read(len(header)) != header:
                raise StoreError(
                    f"{self.path} is {found} bytes of an unfinished shard of another run, or truncated; expected "
                    f"{ends[-1]} bytes for rows {rows.start}–{rows.stop - 1} of this run. Delete this file and run "
                    "the same command again; only its rows are computed anew."
                )
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ if mode == "r" else mmap.ACCESS_WRITE)
        view = memoryview(self._map)
        self.hashes = np.frombuffer(view[ends[0] : ends[1]], dtype=np.uint64)
        self.grads = np.frombuffer(view[ends[1] : ends[2]], dtype=dtype).reshape(count, width)
        self.out_to_loss = np.frombuffer(view[ends[2] : ends[3]], dtype=np.float32)
        if mode == "r+":
            for row in self.damaged():
                self.hashes[row] = 0

    def damaged(self) -> list[int]:
        """List the present rows whose values do not match their hashes."""
        return [row for row in np.flatnonzero(self.hashes).tolist() if self._hash(row) != self.hashes[row]]

    @property
    def done(self) -> np.ndarray:
        """One bool per row, `(rows,)`: whether the row is present."""
        return self.hashes != 0

    def write(self, rows: np.ndarray, grads: Tensor, out_to_loss: Tensor) -> None:
        """Write the values of rows, counted from the start of the shard. They count as missing until `mark`."""
        self.grads[rows] = grads.numpy()
        self.out_to_loss[rows] = out_to_loss.numpy()

    def mark(self, rows: np.ndarray) -> None:
        """Mark rows that have been written as present."""
        hashes = np.array([self._hash(row) for row in rows.tolist()], dtype=np.uint64)
        self.hashes[rows] = hashes  # in one assignment, so that a killed process has marked all of the batch or none

    def _hash(self, row: int) -> int:
        digest = xxhash.xxh3_64(self.grads[row].data)
        digest.update(self.out_to_loss[row : row + 1].data)
        return digest.intdigest() or 1

    @staticmethod
    def _header(shards: ShardSet, rows: range) -> bytes:
        content = {
            "dtype": str(shards.dtype),
            "identity": dict(shards.identity),
            "start": rows.start,
            "stop": rows.stop,
            "width": shards.width,
        }
        text = json.dumps(content, sort_keys=True).encode() + b"\n"
        return text.ljust(-(-len(text) // _BLOCK) * _BLOCK)


class RowWriter:
    """Fills a [`ShardSet`] row by row, in any order, with any number of processes on one machine."""

    def __init__(self, shards: ShardSet) -> None:
        """
        Args:
            shards: the shards to fill; their storage dtype must be float16 or float32.
        """
        self.shards = shards
        self._complete: set[int] = set()
        self._open: OrderedDict[int, PartialShard] = OrderedDict()

    def done(self, rows: Sequence[int] | None = None) -> np.ndarray:
        """Tell which rows are present.

        Args:
            rows: row numbers; `None` stands for all rows.

        Returns:
            `numpy.ndarray` of shape `(len(rows),)`: one bool per row.

        Raises:
            StoreError: a file is truncated, or belongs to another run.
        """
        plan = self.shards.plan
        index = np.arange(plan.n_rows) if rows is None else np.asarray(rows)
        of_shard = index // plan.shard_size
        result = np.zeros(len(index), dtype=bool)
        for shard in np.unique(of_shard).tolist():
            members = of_shard == shard
            if self._is_complete(shard):
                result[members] = True
            elif self._partial_path(shard).exists():
                result[members] = self._partial(shard).done[index[members] - plan.rows(shard).start]
        return result

    def write(self, rows: Sequence[int], grads: Tensor, out_to_loss: Tensor) -> None:
        """Write rows. Those of complete shards are skipped.

        Args:
            rows: row numbers, each at most once.
            grads: `(len(rows), k)` on the CPU, in the storage dtype.
            out_to_loss: `(len(rows),)` on the CPU, float32.
        """
        index = np.asarray(rows)
        of_shard = index // self.shards.plan.shard_size
        touched = [shard for shard in np.unique(of_shard).tolist() if not self._is_complete(shard)]
        parts = {}
        for shard in touched:
            members = np.flatnonzero(of_shard == shard)
            parts[shard] = index[members] - self.shards.plan.rows(shard).start
            chosen = torch.from_numpy(members)
            self._partial(shard).write(parts[shard], grads[chosen], out_to_loss[chosen])
        # Rows are marked after the values of the whole batch: a killed run has saved all of a batch or none of it.
        for shard in touched:
            self._partial(shard).mark(parts[shard])
        for shard in touched:
            if self._partial(shard).done.all():
                self._finish(shard)

    def read_all(self) -> tuple[Tensor, Tensor]:
        """Read all rows.

        Returns:
            `tuple`: `grads` of shape `(n_rows, k)` in the storage dtype, and `out_to_loss` of shape `(n_rows,)`.

        Raises:
            IncompleteStoreError: rows are missing.
            StoreError: a shard is invalid.
        """
        done = self.done()
        if not done.all():
            absent = np.flatnonzero(~done)
            raise IncompleteStoreError(
                f"{self.shards.directory} lacks {len(absent)} of {len(done)} rows (first: {absent[:5].tolist()}). "
                "Write these before reading."
            )
        for index in self.shards.unwritten():  # complete, but a run was killed before the last step
            self._finish(index)
        parts = list(self.shards)
        # A copy even of a single part: the last bit of matrix products depends on how a file's values are aligned.
        return torch.cat([part.grads for part in parts]), torch.cat([part.out_to_loss for part in parts])

    def delete(self) -> None:
        """Remove all rows."""
        self._open.clear()
        self._complete.clear()
        for index in range(len(self.shards)):
            self.shards.path(index).unlink(missing_ok=True)
            self._partial_path(index).unlink(missing_ok=True)

    def _is_complete(self, index: int) -> bool:
        if index not in self._complete and self.shards.is_written(index):
            self._complete.add(index)
            self._forget(index)
        return index in self._complete

    def _partial_path(self, index: int) -> Path:
        return self.shards.path(index).with_suffix(".partial")

    def _partial(self, index: int) -> PartialShard:
        if index not in self._open:
            self._open[index] = PartialShard(self.shards, index)
            while len(self._open) > _OPEN_FILES:
                self._open.popitem(last=False)
        self._open.move_to_end(index)
        return self._open[index]

    def _finish(self, index: int) -> None:
        """Write an unfinished shard, all of whose rows are present, as a finished one."""
        partial = self._partial(index)
        if damaged := partial.damaged():
            raise StoreError(
                f"{partial.path} was changed by somebody else while this process had it open: rows {damaged[:5]} do "
                "not match their checksums. Run the same command again, which computes these rows anew."
            )
        self.shards.write(index, torch.from_numpy(partial.grads.copy()), torch.from_numpy(partial.out_to_loss.copy()))
        self._forget(index)

    def _forget(self, index: int) -> None:
        self._open.pop(index, None)
        self._partial_path(index).unlink(missing_ok=True)
