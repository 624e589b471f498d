"""Digests of datasets, of rows, and of any value in a row, which are the same in every process.

Values are fed to the hash in a prefix-free encoding: one byte for the type, a length unless the type determines it,
then the content. So no two different values give the same bytes: `["ab", "c"]` is not `["a", "bc"]`, and `1`, `True`,
`1.0`, `"1"` and `b"1"` are five values. Floats are compared by their bits: -0.0 is not 0.0, and NaNs with different
payloads are different values. The order counts, except in mappings and sets.
"""

import array
import copyreg
import dataclasses
import itertools
import json
import os
import struct
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
import xxhash
from torch import Tensor

from hf_trak._compat import class_if_imported

if TYPE_CHECKING:
    from datasets import Dataset

_ROWS = 1000

_MAX_DEPTH = 100  # a level takes up to four frames of the interpreter's stack, which has 1000


class Digest(Protocol):
    """A hash object of `hashlib` or `xxhash`, or anything else that bytes can be fed to."""

    def update(self, data: Any, /) -> Any:
        """Append bytes to the content."""


def fingerprint_dataset(dataset: Any) -> str:
    """Identify a dataset by its content, the same on every machine.

    A `datasets.Dataset` is hashed as a whole: column names, features (`ClassLabel` names, the mode of an `Image`, the
    sampling rate of an `Audio`), and every stored value in row order. A transform or format set on it is code, and
    left out. Of files that it only names by path, the path and the size are hashed; an edit that keeps the size is not
    noticed. Of any other dataset every row is read once and hashed. If that takes long, as for images that are
    decoded, give the dataset an attribute `fingerprint`, a string that changes whenever a row does; it is hashed
    instead of the rows.

    Args:
        dataset: a dataset with a length and rows by number.

    Returns:
        32 hex digits.

    Raises:
        TypeError: `fingerprint` exists and is not a string, or a row holds a value whose content cannot be hashed.
    """
    digest = xxhash.xxh3_128()
    kind = class_if_imported("datasets", "Dataset")
    if kind is not None and isinstance(dataset, kind):
        update_digest(digest, ("datasets.Dataset", len(dataset), json.dumps(dataset.features.to_dict())))
        for table in dataset.with_format("arrow").iter(batch_size=_ROWS):
            for column in table.column_names:
                _update_from_arrow(digest, column, values := _one_array(table[column]))
                for size in _file_sizes(values):
                    update_digest(digest, size)
        return digest.hexdigest()
    if (given := _own_fingerprint(dataset)) is not None:
        update_digest(digest, ("fingerprint", len(dataset), given))
        return digest.hexdigest()
    update_digest(digest, ("rows", len(dataset)))
    for index in range(len(dataset)):
        update_digest(digest, dataset[index])
    return digest.hexdigest()


def update_digest(digest: Digest, value: Any) -> None:
    """Feed a row, or any value in one, to a hash.

    Numbers, texts, bytes, tensors, arrays and PIL images are hashed by type and content; mappings, sequences and sets
    by their items; any other object by its class and the state that `pickle` would save. Nothing is pickled, and
    addresses in memory are not hashed.

    Raises:
        TypeError: the content cannot be hashed: a function, an open file, an object without any content, or nesting
            deeper than 100 levels.
    """
    _encode(digest, value, 0)


def _own_fingerprint(dataset: Any) -> str | None:
    given = getattr(dataset, "fingerprint", None)
    if given is not None and not isinstance(given, str):
        raise TypeError(
            f"`{type(dataset).__name__}.fingerprint` is {given!r}. Expected a string that identifies the rows, or no "
            "such attribute: then all rows are read and hashed."
        )
    return given or None


def _update_from_arrow(digest: Digest, name: str, values: pa.Array) -> None:
    batch = pa.RecordBatch.from_arrays([values], names=[name])
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema.remove_metadata()) as writer:
        writer.write_batch(batch.replace_schema_metadata(None))
    digest.update(memoryview(sink.getvalue()))


def _one_array(column: pa.ChunkedArray) -> pa.Array:
    """Join the chunks of a column to one array that owns only its values, so that equal values give equal bytes."""
    combined = column.combine_chunks()
    array = combined if isinstance(combined, pa.Array) else pa.concat_arrays(combined.chunks)
    return array.take(pa.array(range(len(array)))) if array.offset else array


def _file_sizes(values: pa.Array) -> Iterator[int]:
    """Yield the sizes of files that a column names without holding their bytes (`Image`, `Audio`, `Video`).

    The size of a file that is not on this machine is −1.
    """
    if isinstance(values, pa.ExtensionArray):
        values = values.storage
    kind = values.type
    if pa.types.is_struct(kind):
        if {field.name for field in kind} == {"bytes", "path"}:
            unread = pc.and_(pc.is_null(values.field("bytes")), pc.is_valid(values.field("path")))
            yield from (_size(path) for path in values.field("path").filter(unread).to_pylist())
        else:
            for field in range(kind.num_fields):
                yield from _file_sizes(values.field(field))
    elif pa.types.is_nested(getattr(kind, "value_type", pa.null())):  # lists of any kind, of structs or lists
        yield from _file_sizes(values.flatten())


def _size(path: str) -> int:
    try:
        return os.stat(path).st_size
    except (OSError, ValueError):  # of another machine, in an archive, behind a URL
        return -1


def _head(tag: bytes, count: int) -> bytes:
    return tag + struct.pack("<Q", count)


def _encode(digest: Digest, value: Any, depth: int) -> None:
    if depth > _MAX_DEPTH:
        raise TypeError(
            f"A row holds a {type(value).__name__} at more than {_MAX_DEPTH} levels of nesting, or one that contains "
            "itself. Expected values of finite depth. Give the dataset an attribute `fingerprint`, a string that "
            "changes whenever a row does."
        )
    if (write := _WRITERS.get(type(value))) is not None:
        write(digest, value, depth)
    elif isinstance(value, torch.Tensor):
        _tensor(digest, value, depth)
    elif isinstance(value, np.generic | np.memmap):
        _array(digest, np.asarray(value), depth)
    elif isinstance(value, Mapping):
        _mapping(digest, value, depth)
    elif _is_image(value):
        _image(digest, value, depth)
    elif isinstance(value, memoryview):
        digest.update(b"V")
        _encode(digest, (value.format, value.shape, value.tobytes()), depth + 1)
    elif isinstance(value, type):
        _bytes(digest, b"t", _class_name(value).encode())
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        digest.update(b"R")
        _encode(digest, (type(value), value._fields, *value), depth + 1)
    elif dataclasses.is_dataclass(value):
        fields = {field.name: getattr(value, field.name, None) for field in dataclasses.fields(value)}
        digest.update(b"D")
        _encode(digest, (type(value), fields), depth + 1)
    else:
        _object(digest, value, depth)


def _bytes(digest: Digest, tag: bytes, content: bytes | bytearray) -> None:
    digest.update(_head(tag, len(content)) + content)


def _sequence(digest: Digest, value: list[Any] | tuple[Any, ...], depth: int) -> None:
    tag = b"L" if isinstance(value, list) else b"T"
    kinds = set(map(type, value))
    if kinds == {int} or kinds == {float}:  # tokens, say: at once, and as many bytes for each
        code = "q" if kinds == {int} else "d"
        try:
            numbers = array.array(code, value)
        except OverflowError:
            pass
        else:
            digest.update(_head(tag + code.encode(), len(value)) + numbers.tobytes())
            return
    digest.update(_head(tag + b" ", len(value)))
    for item in value:
        _encode(digest, item, depth + 1)


def _mapping(digest: Digest, value: Mapping[Any, Any], depth: int) -> None:
    digest.update(_head(b"M", len(value)))
    for key, encoded in sorted(((key, _encoded(key, depth)) for key in value), key=lambda pair: pair[1]):
        digest.update(encoded)
        _encode(digest, value[key], depth + 1)


def _set(digest: Digest, value: set[Any] | frozenset[Any], depth: int) -> None:
    digest.update(_head(b"E", len(value)))
    for encoded in sorted(_encoded(item, depth) for item in value):
        digest.update(encoded)


class _Collected(bytearray):
    """Collects bytes in place of a hash of them."""

    update = bytearray.extend


def _encoded(value: Any, depth: int) -> bytes:
    collected = _Collected()
    _encode(collected, value, depth + 1)
    return bytes(collected)


def _tensor(digest: Digest, value: torch.Tensor, depth: int) -> None:
    if value.is_meta or value.is_nested or value.is_quantized:
        _refuse(value)
    if type(value) not in (torch.Tensor, torch.nn.Parameter):  # an image or boxes of `torchvision.tv_tensors`, say
        digest.update(b"s")
        _encode(digest, (type(value), getattr(value, "__dict__", {})), depth + 1)
        value = value.as_subclass(torch.Tensor)
    value = value.detach()
    head = ("strided", str(value.dtype), tuple(value.shape))
    if value.layout != torch.strided:
        sparse = (value if value.layout == torch.sparse_coo else value.to_sparse_coo()).coalesce()
        digest.update(b"X")
        _encode(digest, (str(value.layout), *head[1:], sparse.indices(), sparse.values()), depth + 1)
        return
    flat = value.cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
    digest.update(b"X")
    _encode(digest, head, depth + 1)
    if flat.numel():
        digest.update(flat.view(torch.uint8).numpy().data)


def _array(digest: Digest, value: np.ndarray[Any, Any], depth: int) -> None:
    kind = value.dtype
    digest.update(b"A")
    _encode(digest, (kind.str, kind.name, value.shape), depth + 1)
    if kind.names:
        for name in kind.names:
            _encode(digest, (name, value[name]), depth + 1)
    elif kind.kind not in "biufcmMSUV":  # objects, texts of any length: the array itself holds only pointers
        _encode(digest, value.ravel().tolist(), depth + 1)
    elif kind.kind in "fc" and kind.itemsize > np.dtype(kind.kind + ("8" if kind.kind == "f" else "16")).itemsize:
        _encode(digest, [repr(item) for item in value.ravel()], depth + 1)  # extended precision has unused bytes
    elif value.size:
        digest.update(np.ascontiguousarray(value).reshape(-1).view(np.uint8).data)


def _is_image(value: Any) -> bool:
    module = sys.modules.get("PIL.Image")
    return module is not None and isinstance(value, module.Image)


def _image(digest: Digest, value: Any, depth: int) -> None:
    """Hash pixels, the mode in which they are read, and what affects them in conversions and when turned upright."""
    value.load()
    palette = None if value.palette is None else (value.palette.mode, bytes(value.palette.palette))
    orientation = value.getexif().get(0x0112)
    digest.update(b"P")
    _encode(digest, (value.mode, value.size, palette, value.info.get("transparency"), orientation), depth + 1)
    if getattr(value, "is_animated", False):
        shown = value.tell()
        for frame in range(value.n_frames):
            value.seek(frame)
            _bytes(digest, b"Y", value.tobytes())
        value.seek(shown)
    else:
        _bytes(digest, b"Y", value.tobytes())


def _object(digest: Digest, value: Any, depth: int) -> None:
    """Hash class and state of an object, as its `__reduce_ex__` returns them for `pickle`."""
    try:
        reduced = copyreg.dispatch_table.get(type(value), lambda given: given.__reduce_ex__(4))(value)
    except (TypeError, AttributeError, RuntimeError):
        _refuse(value)
    digest.update(b"O")
    if isinstance(reduced, str):  # what a module holds under this name: `...`, a built-in function
        _encode(digest, (type(value), getattr(value, "__module__", None), reduced), depth + 1)
        return
    make, arguments, state, items, pairs = itertools.islice(itertools.chain(reduced, itertools.repeat(None)), 5)
    items, pairs = list(items or ()), list(pairs or ())
    if make is copyreg.__newobj__ and len(arguments) == 1 and not (state or items or pairs):  # type: ignore[attr-defined]
        _refuse(value)  # only its identity tells it from others of its class
    name = f"{getattr(make, '__module__', None)}.{getattr(make, '__qualname__', None)}"
    _encode(digest, (type(value), name, arguments, state, items, pairs), depth + 1)


def _class_name(value: type) -> str:
    return f"{value.__module__}.{value.__qualname__}"


def _refuse(value: Any) -> NoReturn:
    raise TypeError(
        f"A row holds a {_class_name(type(value))} ({repr(value)[:80]}), whose content cannot be hashed. Expected "
        "numbers, texts, bytes, tensors, arrays, images, or mappings, sequences and plain objects of these. Give the "
        "dataset an attribute `fingerprint`, a string that changes whenever a row does."
    )


_WRITERS: dict[type, Callable[[Digest, Any, int], None]] = {
    type(None): lambda digest, _, depth: digest.update(b"N"),
    bool: lambda digest, value, depth: digest.update(b"B1" if value else b"B0"),
    int: lambda digest, value, depth: _bytes(
        digest, b"I", value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    ),
    float: lambda digest, value, depth: digest.update(struct.pack("<cd", b"F", value)),
    str: lambda digest, value, depth: _bytes(digest, b"S", value.encode("utf-8", "surrogatepass")),
    bytes: lambda digest, value, depth: _bytes(digest, b"Y", value),
    bytearray: lambda digest, value, depth: _bytes(digest, b"Y", value),
    list: _sequence,
    tuple: _sequence,
    dict: _mapping,
    set: _set,
    frozenset: _set,
    torch.Tensor: _tensor,
    np.ndarray: _array,
}


@dataclass(frozen=True)
class RowContents:
    """The digests of all rows of a dataset.

    Attributes:
        columns: names of the columns.
        digests: xxh3-64 of every value, as a signed number, `(n, columns)`, int64.
    """

    columns: tuple[str, ...]
    digests: Tensor

    def changed(self, rows: "Dataset", numbers: Sequence[int]) -> list[int]:
        """List the rows that have another value in any column that both have.

        Args:
            rows: rows that were read, with at least one of the columns.
            numbers: their numbers.

        Returns:
            The numbers of rows that have changed.
        """
        names = [name for name in self.columns if name in rows.column_names]
        places = [self.columns.index(name) for name in names]
        expected = self.digests[torch.tensor(list(numbers), dtype=torch.int64)][:, places]
        wrong = (content_digests(rows, names) != expected).any(dim=1)
        return [number for number, differs in zip(numbers, wrong.tolist(), strict=True) if differs]


def content_digests(rows: "Dataset", columns: Sequence[str]) -> Tensor:
    """Hash the stored values of some columns.

    Args:
        rows: a `datasets.Dataset`.
        columns: names of the columns.

    Returns:
        `(n, len(columns))`, int64.

    Raises:
        TypeError: a value cannot be hashed.
    """
    found = torch.empty(len(rows), len(columns), dtype=torch.int64)
    start = 0
    for table in rows.with_format("arrow").iter(batch_size=_ROWS):
        for place, name in enumerate(columns):
            digests = [_digest(value) for value in _values(table[name])]
            found[start : start + len(digests), place] = torch.tensor(digests, dtype=torch.int64)
        start += len(table)
    return found


def _values(column: pa.ChunkedArray) -> list[Any]:
    return [
        value
        for chunk in column.chunks
        for value in (chunk.storage if isinstance(chunk, pa.ExtensionArray) else chunk).to_pylist()
    ]


def _digest(value: Any) -> int:
    digest = xxhash.xxh3_64()
    update_digest(digest, value)
    number = digest.intdigest()
    return number - (number >> 63 << 64)
