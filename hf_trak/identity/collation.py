"""A probe of code that cannot be compared: the batch that tokenizers, transforms and collators make of a few rows.

Whole batches of these rows are described, and the descriptions compared: integers, texts and masks exactly, floating
point columns by a sketch and with a tolerance, since CPUs round differently. Changes are not noticed if they concern
only other rows, or conditions that the probed rows do not meet (such as a text longer than the truncation length).
"""

import dataclasses
import random
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor

from hf_trak.identity.row_digest import update_digest

Collate = Callable[[list[int]], Any]
"""Turns row numbers of a dataset into their batch, reading the rows again in each call."""

PROJECTIONS = 8
"""Random projections in a sketch. With Δ of a value's norm changed, their root mean square stays below Δ/7 with a
probability of 3e-6 (χ² with 8 degrees of freedom)."""
RELATIVE_ROUNDING = 1e-6
"""Largest difference between two CPUs in resizing and normalizing, relative to the norm of a sample, in float32."""
MARGIN = 10.0
"""The tolerance is this many times the rounding. A single row of pixels of an image 224 × 224 that changes by 1e-3
changes 7e-5 of the image's norm, seven times the tolerance."""
MIN_COLLATIONS, MAX_COLLATIONS, SPARE_SECONDS = 4, 20, 0.2
"""Number of times that rows are collated to see whether the results are the same: more than four only if that takes
little time."""

_PLAIN, _MOST_BITS = {torch.int64, torch.int32, torch.bool, torch.uint8, torch.float32}, 2**20

_COLUMN_OF_A_ROW = re.compile(r"row (?P<number>\d+)\.(?P<column>.*)")
"""Columns of rows that are collated alone, as `RowBatches` describes them."""

_SIGNS_KEY = 0x68665F7472616B
_CHUNK = 1 << 16
_SENTINEL = 1e30  # attention masks hold the lowest number of their type, which would dominate every sum


def probe_rows(count: int, sequential: bool = False) -> list[int]:
    """Choose the rows of a dataset to probe: 0, 1, 2, those at a third and at half, and the last.

    Args:
        count: number of rows.
        sequential: whether the dataset is a stream, which is read from its start; then only the first three are taken.
    """
    rows = {0, 1, 2} if sequential else {0, 1, 2, count // 3, count // 2, count - 1}
    return sorted(row for row in rows if row < count)


def collation_of(collate: Collate, rows: Sequence[int]) -> dict[str, Any]:
    """Describe the batch of some rows, as plain JSON.

    Args:
        collate: makes the batch: a mapping, sequence or dataclass of columns, or one column.
        rows: row numbers, see [`probe_rows`].

    Returns:
        `{"rows": …, "columns": {path: column}}`. A column has its `type`, its `shape` if it is an array, and one item
        for each row (or one for all rows, if its first dimension is not that of the rows): hex digits in `digests`, or
        for floating point `norms` and `projections`, with `special` for digests of the positions and values of
        non-finite and huge numbers (over 1e30). Objects whose content cannot be hashed have only a `type`. Random
        generators of torch, numpy and Python are restored.
    """
    with random_state_kept():
        batch = collate(list(rows))
    columns = {path: _described(value, len(rows)) for path, value in _columns(batch)}
    return {"rows": [int(row) for row in rows], "columns": columns}


def collation_changes(saved: Mapping[str, Any], given: Mapping[str, Any]) -> list[str]:
    """List what differs between two descriptions, one line for each column; empty if nothing does.

    Floating point columns may differ by 1e-5 of the norm of a sample (bfloat16: 9e-4, float16: 3e-4), see
    [`RELATIVE_ROUNDING`].

    Args:
        saved, given: what [`collation_of`] returned.
    """
    draws = saved.get("draws", 0), given.get("draws", 0)
    if draws[0] != draws[1]:
        return [f"draws of each row: saved {draws[0]}, given {draws[1]} (0: rows are not drawn at random)"]
    if saved["rows"] != given["rows"]:
        return [f"rows: saved {saved['rows']}, given {given['rows']}"]
    before, after = saved["columns"], given["columns"]
    lines, alone = list[str](), dict[str, dict[int, str]]()
    for path in [*before, *(path for path in after if path not in before)]:
        first, second = before.get(path), after.get(path)
        if first is None or second is None or _kind(first) != _kind(second):
            changed, said = [0], f"saved {_kind(first)}, given {_kind(second)}"
        else:
            changed, relative = _changed_items(first, second)
            size = f", by about {relative:.1g} of their norm" if relative else ""
            said = f"other values{_of_rows(changed, first, saved['rows'])}{size} ({_kind(first)})"
        if changed and (row := _COLUMN_OF_A_ROW.fullmatch(path)):
            alone.setdefault(row["column"], {})[int(row["number"])] = said
        elif changed:
            lines.append(f"{path}: {said}")
    for column, rows in alone.items():
        said = next(iter(rows.values())) if len(set(rows.values())) == 1 else "other values"
        every = " (in another order, or from another transform or collator?)" if sorted(rows) == saved["rows"] else ""
        lines.append(f"{column}: {said} in the rows {sorted(rows)}{every}")
    return lines


def drawn_at_random(collate: Collate, rows: Sequence[int]) -> bool:
    """Tell whether rows come out at random: their collation draws from a generator, or gives something else each time.

    Random generators of torch, numpy and Python are restored.

    Args:
        collate: see [`collation_of`].
        rows: row numbers, see [`probe_rows`].
    """
    with random_state_kept():
        before = _generator_states()
        collate(list(rows))
        if _generator_states() != before:
            return True
    return _difference(collate, rows) is not None


def _generator_states() -> tuple[Any, ...]:
    kind, words, *others = np.random.get_state()
    return random.getstate(), (kind, bytes(np.asarray(words)), *others), bytes(torch.get_rng_state().numpy())


def check_repeatable(collate: Collate, rows: Sequence[int]) -> None:
    """Refuse random rows, by collating the same ones 4 to 20 times, as often as fits into 0.2 s.

    With six rows and four times, a flip of every second image is missed in one run of 260,000, and masking of 15 % of
    the tokens, with four tokens in a row, in one of 5 million. A change of one row in ten is missed in one run of 12
    after four times, and in one of 300,000 after twenty. Random generators of torch, numpy and Python are not seeded,
    and are restored.

    Args:
        collate: see [`collation_of`].
        rows: row numbers, see [`probe_rows`].

    Raises:
        ValueError: a column differs between two times; names it.
    """
    if (found := _difference(collate, rows)) is not None:
        raise ValueError(_random_rows(*found, rows))


def _difference(
    collate: Collate, rows: Sequence[int]
) -> tuple[Mapping[str, list[Any]], Mapping[str, list[Any]]] | None:
    """Collate rows again and again, and return the first two results that differ; `None` if none do."""
    first: dict[str, list[Any]] | None = None
    start = time.perf_counter()
    with random_state_kept():
        for done in range(MAX_COLLATIONS):
            if done >= MIN_COLLATIONS and time.perf_counter() - start > SPARE_SECONDS:
                break
            found = {path: _bits(value, len(rows)) for path, value in _columns(collate(list(rows)))}
            if first is None:
                first = found
            if found != first:
                return first, found
    return None


def _random_rows(first: Mapping[str, list[Any]], found: Mapping[str, list[Any]], rows: Sequence[int]) -> str:
    names = [path for path in {**first, **found} if first.get(path) != found.get(path)]
    pairs = [(first[path], found[path]) for path in names if len(first.get(path, ())) == len(found.get(path, ()))]
    changed = {
        row for old, new in pairs if len(old) == len(rows) for row, a, b in zip(rows, old, new, strict=True) if a != b
    }
    which = f" of the rows {sorted(changed)}" if changed else ""
    return (
        f"The same rows came out of dataset and collator with other values when they were collated again, in {names}"
        f"{which}, although the generators of torch, numpy and Python were given the same seeds. Expected random "
        "numbers (masks, crops, augmentation) from these three, or from a generator that the collator or transform "
        "keeps as an attribute. Draw from one of them, use the transform and the collator of the evaluation, or save "
        "the random choices in the dataset, for example by masking tokens with `dataset.map`."
    )


@contextmanager
def random_state_kept() -> Iterator[None]:
    """Restore the random generators of Python, NumPy and torch, on all devices in use, when the block ends."""
    python, numpy = random.getstate(), np.random.get_state()
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    with torch.random.fork_rng(devices):
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)


def _columns(batch: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the columns of a batch with their paths: keys, indices and field names, joined by dots."""
    items: Iterator[tuple[Any, Any]]
    if isinstance(batch, Mapping):
        items = iter(batch.items())
    elif dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        items = ((field.name, getattr(batch, field.name)) for field in dataclasses.fields(batch))
    elif isinstance(batch, list | tuple) and _holds_columns(batch):
        items = iter(enumerate(batch))
    else:
        yield path or "batch", batch
        return
    for name, value in items:
        yield from _columns(value, f"{path}.{name}" if path else str(name))


def _holds_columns(values: Sequence[Any]) -> bool:
    return any(
        isinstance(value, Mapping | Tensor | np.ndarray)
        or dataclasses.is_dataclass(value)
        or (isinstance(value, list | tuple) and _holds_columns(value))
        for value in values
    )


def _exact(value: Any, count: int) -> list[str]:
    """Hash the bits of a column: one digest for each row if it has as many items, otherwise one for all.

    Of objects that cannot be hashed, the type is returned in place of digests.
    """
    shape = getattr(value, "shape", None)
    whole = isinstance(value, Tensor | np.ndarray) and shape is not None and len(shape) > 0
    items: Any = [value]
    if count and (whole or isinstance(value, list | tuple)) and len(value) == count:
        items = value
    digests = []
    for item in items:
        digest = xxhash.xxh3_64()
        try:
            update_digest(digest, item)
        except TypeError:
            return [_type(value)]
        digests.append(digest.hexdigest())
    return digests


def _bits(value: Any, count: int) -> list[Any]:
    """Return what [`_exact`] does, with the bits of small tensors themselves in place of digests of them."""
    plain = type(value) is Tensor and value.dtype in _PLAIN and value.layout == torch.strided and not value.is_nested
    if not plain or value.device.type != "cpu" or not value.ndim or value.numel() > _MOST_BITS:
        return _exact(value, count)
    array = value.numpy(force=True)
    return [(value.dtype, value.shape, part.tobytes()) for part in (array if len(array) == count else [array])]


def _described(value: Any, count: int) -> dict[str, Any]:
    numbers = _floats(value)
    if numbers is None:
        digests = _exact(value, count)
        column: dict[str, Any] = {"type": _type(value)}
        if isinstance(value, Tensor | np.ndarray | list | tuple):
            column["shape"] = list(getattr(value, "shape", (len(value),)))
        return column if digests == [_type(value)] else {**column, "digests": digests}
    split = count if numbers.ndim and numbers.shape[0] == count else 1
    shape = list(value.shape) if isinstance(value, Tensor | np.ndarray) else list(numbers.shape)
    return {"type": _type(value), "shape": shape, **_sketch(numbers.reshape(split, -1))}


def _type(value: Any) -> str:
    if isinstance(value, Tensor):
        return str(value.dtype)
    if isinstance(value, np.ndarray | np.generic):
        return f"numpy.{value.dtype}"
    kind = type(value)
    return kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def _floats(value: Any) -> np.ndarray[Any, Any] | None:
    """Convert a column of floating point numbers to float64, complex ones to pairs; `None` for other columns."""
    if isinstance(value, Tensor):
        if not (value.is_floating_point() or value.is_complex()) or value.is_nested or value.is_meta:
            return None
        value = value.detach().cpu().to_dense() if value.layout != torch.strided else value.detach().cpu()
        return (torch.view_as_real(value.resolve_conj()) if value.is_complex() else value).double().numpy()
    if isinstance(value, list | tuple) and value and set(map(type, value)) == {float}:
        return np.array(value)
    if not isinstance(value, np.ndarray | np.generic | float):
        return None
    array = np.asarray(value)
    if array.dtype.kind == "c":
        return np.stack([array.real, array.imag], axis=-1).astype(np.float64)
    return array.astype(np.float64) if array.dtype.kind == "f" else None


def _sketch(rows: np.ndarray[Any, Any]) -> dict[str, Any]:
    """Compute norm and random projections of each row of a matrix, and a digest of the values that cannot be summed.

    A projection is the sum of the entries with fixed random signs: the root mean square of the difference of two
    projections is the norm of the difference of the rows. The signs are bits of a Philox generator; byte i has those
    of entry i.
    """
    ordinary = np.abs(rows) < _SENTINEL  # False for NaN
    finite = np.where(ordinary, rows, 0.0)
    signs = np.random.Philox(key=_SIGNS_KEY)
    sums = np.zeros((len(rows), PROJECTIONS))
    for start in range(0, rows.shape[1], _CHUNK):
        chunk = finite[:, start : start + _CHUNK]
        drawn = signs.random_raw(_CHUNK // 8).view(np.uint8)[: chunk.shape[1], None]
        sums += chunk @ (np.unpackbits(drawn, axis=1).astype(np.float64) * 2 - 1)
    sketch: dict[str, Any] = {
        "norms": [_short(norm) for norm in np.sqrt(np.square(finite).sum(axis=1))],
        "projections": [[_short(value) for value in values] for values in sums],
    }
    if not ordinary.all():
        sketch["special"] = [_special(row, fine) for row, fine in zip(rows, ordinary, strict=True)]
    return sketch


def _special(row: np.ndarray[Any, Any], ordinary: np.ndarray[Any, Any]) -> str:
    """Hash the positions and values of NaN, infinite and huge entries of a row; all NaNs count as one value."""
    places = np.flatnonzero(~ordinary)
    digest = xxhash.xxh3_64()
    update_digest(digest, (places, np.nan_to_num(row[places], nan=0.0, posinf=np.inf, neginf=-np.inf)))
    return digest.hexdigest()


def _short(value: float) -> float:
    return float(f"{value:.9g}")


def _kind(column: Mapping[str, Any] | None) -> str:
    if column is None:
        return "no such column"
    return f"{column['type']} of shape {tuple(column['shape'])}" if "shape" in column else column["type"]


def _tolerance(kind: str) -> float:
    """Return the tolerance for a type, relative to the norm of a sample.

    Values that differ by r before they are rounded to a precision ε > r differ afterwards in a share r/ε of all
    entries, each time by ε: by √(r ε) of the norm.
    """
    dtype = getattr(torch, kind.removeprefix("torch.").removeprefix("numpy."), torch.float64)
    floating = isinstance(dtype, torch.dtype) and dtype.is_floating_point
    eps = torch.finfo(dtype).eps if floating else 0.0
    return MARGIN * max(RELATIVE_ROUNDING, (RELATIVE_ROUNDING * eps) ** 0.5)


def _changed_items(first: Mapping[str, Any], second: Mapping[str, Any]) -> tuple[list[int], float]:
    """List the items of a column that differ, and the largest difference relative to their norm (0 if not known)."""
    if "norms" not in first:
        pairs = zip(first.get("digests", ()), second.get("digests", ()), strict=True)
        return [item for item, (a, b) in enumerate(pairs) if a != b], 0.0
    none = [None] * len(first["norms"])
    special = zip(first.get("special", none), second.get("special", none), strict=True)
    changed = [item for item, (a, b) in enumerate(special) if a != b]
    norms = np.maximum(first["norms"], second["norms"])
    sums = np.subtract(first["projections"], second["projections"])
    moved = np.maximum(np.sqrt(np.square(sums).mean(axis=1)), np.abs(np.subtract(first["norms"], second["norms"])))
    relative = moved / np.where(norms > 0, norms, 1.0)
    beyond = np.flatnonzero(relative > _tolerance(first["type"])).tolist()
    return sorted({*changed, *beyond}), float(relative[beyond].max()) if beyond else 0.0


def _of_rows(items: Sequence[int], column: Mapping[str, Any], rows: Sequence[int]) -> str:
    described = column.get("norms", column.get("digests", ()))
    return f" in the rows {[rows[item] for item in items]}" if len(described) == len(rows) else ""
