"""The training features of an index: each shard is fetched and checked when it is read, as a whole or in part."""

import os
import struct
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from itertools import accumulate
from math import prod
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import torch
from huggingface_hub.utils import tqdm
from safetensors.torch import save_file
from torch import Tensor

from hf_trak.errors import StoreError
from hf_trak.hub.files import MAX_HEADER_BYTES, Bounds, IndexFiles, tensor_bytes
from hf_trak.hub.index_files import check_published_values, check_rows
from hf_trak.hub.names import parse_foreign_object, shown
from hf_trak.store.atomic import atomic_path
from hf_trak.store.codes import CodedRows, CodeFormat
from hf_trak.store.shard_set import Shard, ShardSet, content_hash
from hf_trak.store.shards import DTYPES, METADATA_KEY, TensorSpec, read_header

T = TypeVar("T")

_LENGTH_BYTES = 8

_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class ShardLayout:
    """The places of the tensors of a shard in its file.

    Attributes:
        header (`int`): bytes of the header.
        stops (`dict[str, int]`): by name of each tensor, in their order in the file, the byte after its last one.
    """

    def __init__(self, specs: Mapping[str, TensorSpec], size: int) -> None:
        """
        Args:
            specs: the tensors of the shard, each with one dtype.
            size: bytes of the file.

        Raises:
            StoreError: a file of this size cannot hold these tensors. The message begins with "it".
        """
        self._specs = dict(sorted(specs.items(), key=lambda item: (-item[1].dtypes[0].itemsize, item[0])))
        sizes = [prod(spec.shape) * spec.dtypes[0].itemsize for spec in self._specs.values()]
        begin = size - sum(sizes)
        self.header = begin - _LENGTH_BYTES
        if not 2 <= self.header <= MAX_HEADER_BYTES:
            raise StoreError(
                f"it has {size} bytes, of which tensors take {sum(sizes)} and the header cannot take the rest"
            )
        ends = list(accumulate(sizes, initial=begin))
        self._starts = dict(zip(self._specs, ends, strict=False))
        self.stops = dict(zip(self._specs, ends[1:], strict=True))

    def tensors(self, data: bytes) -> tuple[dict[str, Tensor], str]:
        """Take the tensors out of the first bytes of a file.

        Args:
            data: the bytes up to the last byte of a tensor.

        Returns:
            The tensors that `data` holds as a whole, and the metadata of hf_trak in the header.

        Raises:
            StoreError: the header is not the one that such a file has. The message begins with "it".
        """
        begin = _LENGTH_BYTES + self.header
        (length,) = struct.unpack("<Q", data[:_LENGTH_BYTES])
        if length != self.header:
            raise StoreError(f"it begins with a header of {length} bytes, and its size implies {self.header}")
        try:
            header = parse_foreign_object(data[_LENGTH_BYTES:begin])
        except ValueError as error:
            raise StoreError(f"its header cannot be read: {error}") from error
        metadata = header.pop("__metadata__", None)
        text = metadata.get(METADATA_KEY) if isinstance(metadata, dict) else None
        if not isinstance(text, str):
            raise StoreError(f"it was not written by hf_trak (no `{METADATA_KEY}` in its metadata)")
        if header != (expected := self._entries()):
            wrong = sorted(name for name in {*header, *expected} if header.get(name) != expected.get(name))
            raise StoreError(
                f"its header has other tensors, shapes or places than its configuration implies (first: {wrong[:3]})"
            )
        return {name: self._tensor(name, data) for name, stop in self.stops.items() if stop <= len(data)}, text

    def _entries(self) -> dict[str, dict[str, Any]]:
        """Return the entries of the tensors in the header, with offsets from its end."""
        begin = _LENGTH_BYTES + self.header
        return {
            name: {
                "dtype": _NAMES[spec.dtypes[0]],
                "shape": list(spec.shape),
                "data_offsets": [self._starts[name] - begin, self.stops[name] - begin],
            }
            for name, spec in self._specs.items()
        }

    def _tensor(self, name: str, data: bytes) -> Tensor:
        spec, content = self._specs[name], bytearray(data[self._starts[name] : self.stops[name]])
        return torch.frombuffer(content, dtype=spec.dtypes[0]).reshape(spec.shape)


def keep_head(path: Path, tensors: Mapping[str, Tensor], metadata: str, check: Callable[[Path], object]) -> None:
    """Write a head to a file, unless it is refused.

    Args:
        path: the file.
        tensors: the first tensors of the shard.
        metadata: the metadata of hf_trak in the shard.
        check: reads the file that it is given, and raises to refuse it.

    Raises:
        StoreError: the file cannot be written, or whatever `check` raises.
    """
    with atomic_path(path) as temporary:
        save_file(dict(tensors), temporary, metadata={METADATA_KEY: metadata})
        check(temporary)


CONNECTIONS = 8

"""Ranges of bytes that are downloaded at the same time."""


_AHEAD = 32

"""Shards that are looked at together, by one of several processes, or for single rows."""


_REQUEST_BYTES = 1 << 17

"""A request takes about the time of so many bytes: a range is worth it where it leaves out more."""


class IndexShards(ShardSet):
    """The training features of one checkpoint of an index."""

    def __init__(
        self, local: ShardSet, files: IndexFiles, folder: str, heads: Path, digests: Callable[[], Tensor | None]
    ) -> None:
        """
        Args:
            local: the same shards, read without any check of an index.
            files: the files of the index.
            folder: directory of the shards in the index.
            heads: directory for heads of shards, see `hf_trak.hub.index_shards`.
            digests: returns the digests of all rows, if there are some, see `hf_trak.hub.index_files`.
        """
        super().__init__(**local.arguments)
        self._files = files
        self._folder = folder
        self._heads = heads
        self._load_digests = digests
        self._known_digests: tuple[Tensor | None] | None = None
        self._checked: set[int] = set()
        self._checked_heads: set[Path] = set()
        self._fetching = threading.Lock()

    def is_written(self, index: int) -> bool:
        """Return `True` for every shard: a published index is complete."""
        return 0 <= index < len(self.plan)

    exists = is_written

    @property
    def content_hash(self) -> str:
        """Return the digest of the checksums of all shards, from the manifest. Reads no shard."""
        return content_hash([self._files.listed[self.path_of(index)].checksum for index in range(len(self))])

    def write(self, index: int, grads: Tensor, out_to_loss: Tensor) -> NoReturn:
        """Raise `StoreError`: an index is read-only."""
        refuse_writing(self._files.name)

    # -- whole shards ------------------------------------------------------------------------------------------------

    def read(self, index: int, verify: bool | None = None, mapped: bool = True) -> Shard:
        """Read one shard, downloading it first if need be.

        Raises:
            HubAccessError: the shard cannot be downloaded.
            RefusedIndexError: the shard has another shape, dtype, checkpoint or checksum than the index says, is not a
                safetensors file, or has values that are not finite.
        """
        path = self.path_of(index)
        with self._files.refused_if_damaged(path):
            self._files.fetch_tensors(path, self.bounds(index))
            if index in self._checked:
                return super().read(index, verify, mapped)
            self._check_parts(self.header(index), index)
            shard = super().read(index, True, mapped)
            check_published_values(shard)
            self._checked.add(index)
            return shard

    def path_of(self, index: int) -> str:
        """Return the path of a shard in the index."""
        return f"{self._folder}/{self.plan.file_name(index, self.prefix)}"

    def bounds(self, index: int) -> Bounds:
        """Return the bounds on the file of a shard."""
        return tensor_bytes(self._specs(index))

    def _check_parts(self, header: dict[str, Any], index: int) -> None:
        """Check that the metadata of a shard of codes has a checksum for each tensor. Raises `StoreError`."""
        if self.code_format is not None:
            parts, names = header.get("tensors"), set(self._specs(index))
            if not isinstance(parts, dict) or set(parts) != names:
                raise StoreError(f"its metadata has {shown(parts)}, not a checksum for each tensor")

    # -- heads -------------------------------------------------------------------------------------------------------

    def prefix_of(self, index: int, count: int) -> Shard:
        """Read the first bytes of every row of a shard, downloading no others.

        A shard that is here as a whole is used. Otherwise its head is, which is fetched together with those of the
        shards that follow, and kept.

        Args:
            index: index of the shard.
            count: bytes per row: those of the first 1, 2, … blocks, see [`CodeFormat.prefixes`]. More than there are
                stand for all, and fewer are rounded down to whole blocks.

        Returns:
            The rows of the shard with the first blocks of their codes.

        Raises:
            ValueError: the features are not codes, or not even the first block fits.
            HubAccessError: the head cannot be downloaded.
            RefusedIndexError: it is not that of a shard of this index, or the server sent other bytes.
        """
        names = self.names_within(count)
        if len(names) == len(self._specs(index)):
            return self.read(index)
        if self._files.is_local(self.path_of(index)):
            return self._prefix_of_local(index, count)
        if self._kept_head(index, names) is None:
            # A pass over all rows is about to need those of the next shards, too. Of several processes, each reads a
            # part of them.
            alone = int(os.environ.get("WORLD_SIZE", "1")) == 1
            self.fetch_prefixes(count, range(index, len(self) if alone else min(index + _AHEAD, len(self))), not alone)
        path = self._kept_head(index, names)
        if path is None:  # the whole shard has come in the meantime
            return self._prefix_of_local(index, count)
        with self._files.refused_if_damaged(self.path_of(index)):
            try:
                if path not in self._checked_heads:
                    self._check_head(path, index, names)
                    self._checked_heads.add(path)
                return self._read_named(path, index, names)
            except StoreError:
                path.unlink(missing_ok=True)  # damaged on this machine, since it was intact when it was kept
                raise

    def _prefix_of_local(self, index: int, count: int) -> Shard:
        """Read the first blocks of a shard that is here as a whole, and check nothing of the others."""
        path = self.path_of(index)
        with self._files.refused_if_damaged(path):
            self._files.fetch_tensors(path, self.bounds(index))
            known = index in self._checked or self.path(index) in self._checked_heads
            if not known:
                self._check_parts(self.header(index), index)
            shard = super().prefix_of(index, count)
            if not known:
                check_published_values(shard)
                self._checked_heads.add(self.path(index))
            return shard

    def fetch_prefixes(self, count: int, indices: Iterable[int] | None = None, quiet: bool = False) -> None:
        """Fetch the heads of some shards, or of all, several at a time. Those that are here are not fetched again.

        Args:
            count: see [`~IndexShards.prefix_of`].
            indices: the shards; `None` for all.
            quiet: whether to hide the progress bar.

        Raises:
            As [`~IndexShards.prefix_of`].
        """
        names = self.names_within(count)
        with self._fetching:
            missing = [
                index
                for index in (range(len(self)) if indices is None else indices)
                if not self._files.is_local(self.path_of(index)) and self._kept_head(index, names) is None
            ]
            if missing:
                self._files.size(self.path_of(missing[0]))  # lists the files before several threads would
            in_parallel(lambda index: self._fetch_head(index, names), missing, "first blocks", quiet)

    # -- single rows -------------------------------------------------------------------------------------------------

    def rows_of(self, wanted: Mapping[int, Sequence[int]]) -> Iterator[tuple[int, Tensor | CodedRows, Tensor]]:
        """Read single rows of some shards, downloading little more than these rows.

        Of each shard that is not here as a whole, what takes less is downloaded: the whole shard, or ranges of bytes
        of the wanted rows. These are compared with the digests of the rows, which are fetched once. Where an index
        has none, whole shards are downloaded, since the checksums in a shard are those of whole tensors.

        Args:
            wanted: by index of a shard, the rows, counted from its first one.

        Yields:
            The index of each shard, ascending, the features of its wanted rows, and their weights q.

        Raises:
            HubAccessError: something cannot be downloaded.
            RefusedIndexError: a row or a shard is not that of this index, or the server sent other bytes.
        """
        indices = sorted(wanted)
        for first in range(0, len(indices), _AHEAD):
            part = indices[first : first + _AHEAD]
            found = in_parallel(lambda index: self._rows(index, list(wanted[index])), part, "rows", quiet=True)
            for index, (features, out_to_loss) in zip(part, found, strict=True):
                yield index, features, out_to_loss

    def _rows(self, index: int, chosen: list[int]) -> tuple[Tensor | CodedRows, Tensor]:
        path, places = self.path_of(index), torch.tensor(chosen, dtype=torch.int64)
        parts = [] if self._files.is_local(path) or self.code_format is None else self._parts(index, chosen)
        apart = sum(map(len, parts)) + _REQUEST_BYTES * len(parts)
        digests = self._digests() if parts and apart < self._files.listed[path].size else None
        if digests is None:
            shard = self.read(index)
            return shard.features[places], shard.out_to_loss[places]
        head = self.prefix_of(index, self._form.prefixes[0])
        assert head.coded is not None  # heads are those of codes
        with self._files.refused_if_damaged(path):
            known = head.coded[places]
            blocks = list(known.blocks)
            data = iter([self._files.fetch_range(path, part.start, part.stop) for part in parts])
            for width in self._form.block_bytes[1:]:
                rows = [torch.frombuffer(bytearray(next(data)), dtype=torch.uint8) for _ in chosen]
                blocks.append(torch.stack(rows).reshape(len(chosen), width))
            coded = CodedRows(self._form, known.scale, tuple(blocks))
            check_rows(coded, digests, [head.start + row for row in chosen])
            return coded, head.out_to_loss[places]

    def _parts(self, index: int, chosen: Sequence[int]) -> list[range]:
        """List the ranges of bytes of all blocks but the first, for each block those of the chosen rows in turn."""
        rows = self.plan.rows(index)
        layout, form = ShardLayout(self._specs(index), self._files.listed[self.path_of(index)].size), self._form
        parts = []
        for name, width in list(zip(form.names, form.block_bytes, strict=True))[1:]:
            start = layout.stops[name] - len(rows) * width
            parts += [range(start + row * width, start + (row + 1) * width) for row in chosen]
        return parts

    def _digests(self) -> Tensor | None:
        with self._fetching:
            if self._known_digests is None:
                self._known_digests = (self._load_digests(),)
        return self._known_digests[0]

    # -- what a head is ----------------------------------------------------------------------------------------------

    @property
    def _form(self) -> CodeFormat:
        assert self.code_format is not None  # `names_within` has looked
        return self.code_format

    def _head(self, index: int, names: Sequence[str]) -> Path:
        form = self._form
        count = form.prefixes[len(names) - 3]
        name = self.plan.file_name(index, self.prefix).removesuffix(".safetensors")
        return self._heads / self._folder / f"{name}-first-{count}.safetensors"

    def _kept_head(self, index: int, names: Sequence[str]) -> Path | None:
        """Find a head on this machine that has these blocks, and maybe more."""
        every = ["out_to_loss", "scale", *self._form.names]
        paths = (self._head(index, every[:last]) for last in range(len(names), len(every)))
        return next((path for path in paths if path.exists()), None)

    def _fetch_head(self, index: int, names: Sequence[str]) -> None:
        """Fetch the head of a shard, check it and keep it."""
        path, specs = self.path_of(index), self._specs(index)
        with self._files.refused_if_damaged(path):
            layout = ShardLayout(specs, self._files.listed[path].size)
            data = self._files.fetch_range(path, 0, layout.stops[names[-1]])
            tensors, metadata = layout.tensors(data)
            keep_head(
                self._head(index, names), tensors, metadata, lambda written: self._check_head(written, index, names)
            )

    def _check_head(self, path: Path, index: int, names: Sequence[str]) -> None:
        """Check a head as strictly as a shard. Raises `StoreError`."""
        rows = self.plan.rows(index)
        header = read_header(path, self.identity, self._specs(index, names), start=rows.start, stop=rows.stop)
        self._files.check_recorded(self.path_of(index), header["checksum"])
        self._check_parts(header, index)
        check_published_values(self._read_named(path, index, names))


def in_parallel(fetch: Callable[[Any], T], items: Sequence[Any], what: str, quiet: bool) -> list[T]:
    """Call a function for several items at a time.

    Args:
        fetch: the function.
        items: its arguments.
        what: text before the progress bar.
        quiet: whether to hide the progress bar.

    Returns:
        What it returned for each.

    Raises:
        Exception: the first error of `fetch`; calls that have not begun are dropped.
    """
    if not items:
        return []
    pool = ThreadPoolExecutor(min(CONNECTIONS, len(items)), "ranges")
    try:
        calls = [pool.submit(fetch, item) for item in items]
        with tqdm(total=len(items), desc=what, unit="files", disable=quiet or None) as bar:
            for call in as_completed(calls):
                call.result()
                bar.update(1)
        return [call.result() for call in calls]
    finally:
        pool.shutdown(cancel_futures=True)


def refuse_writing(name: str) -> NoReturn:
    """Raise the error for an index that is written to.

    Raises:
        StoreError: always.
    """
    raise StoreError(
        f"The index {name} was published and is only read here. To add checkpoints or rows, featurize into another "
        "output directory with `TrakAttributor(...)`, and publish that."
    )
