"""Batches of dataset rows in a fixed order, with the columns that reach the model."""

import inspect
import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import torch
from accelerate.utils import send_to_device
from datasets import Dataset as HFDataset
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, SubsetRandomSampler, WeightedRandomSampler
from torch.utils.data import default_collate as torch_collate
from transformers import (
    DataCollatorForSeq2Seq,
    DataCollatorForTokenClassification,
    DataCollatorWithPadding,
    DefaultDataCollator,
    PreTrainedTokenizerBase,
    default_data_collator,
)
from transformers.feature_extraction_sequence_utils import SequenceFeatureExtractor
from transformers.utils.generic import find_labels

from hf_trak.data.batch_limits import BatchLimits
from hf_trak.data.drawn_rows import DrawnRows, RowDraws, generators_kept, rows_at
from hf_trak.data.images import ImageTokens, SplitRows, image_sizes, split_at_images
from hf_trak.data.language import TOKENS, cut_at_rows
from hf_trak.data.model_inputs import check_rows, stored_columns
from hf_trak.identity.collation import Collate, drawn_at_random, probe_rows
from hf_trak.identity.row_digest import fingerprint_dataset as fingerprint_dataset
from hf_trak.identity.row_digest import update_digest as update_digest
from hf_trak.modelout_functions.base import Collator, WrappingCollator, as_batch
from hf_trak.store.sealed import content_digest

_SEQUENCES = ("input_ids", "input_values", "prompt_ids", "completion_ids", "chosen_ids", "rejected_ids")

"""Columns that collators of transformers and TRL pad to one length within a batch."""


def row_lengths(dataset: Any, rows: range) -> Sequence[int] | None:
    """Count the elements of some rows' sequences, the sum over their columns.

    Args:
        dataset: the dataset.
        rows: consecutive row numbers.

    Returns:
        One number per row, or `None` where the lengths are not stored: in datasets that are not Arrow tables, in those
        with a transform, and in those without tokens.
    """
    if not isinstance(dataset, HFDataset) or dataset.format["type"] == "custom":
        return None
    names = [name for name in _SEQUENCES if name in dataset.column_names]
    if not names:
        return None
    table: pa.Table = dataset.select_columns(names).with_format("arrow")[rows.start : rows.stop]
    total = pa.array([0] * len(rows), pa.int64())
    for name in names:
        column = table.column(name)
        if not (pa.types.is_list(column.type) or pa.types.is_large_list(column.type)):
            return None
        total = pc.add(total, pc.fill_null(pc.list_value_length(column), 0))
    return [int(length) for length in total.to_pylist()]


logger = logging.getLogger(__name__)


def row_count(dataset: Any, name: str) -> int:
    """Count the rows of a map-style dataset.

    Args:
        dataset: the dataset. Rows are identified by their position in it.
        name: name of the argument, for error messages.

    Raises:
        TypeError: the dataset has no length or no rows by index, as a stream or a `DataFrame`; or it is a mapping (of
            splits, or a single row), or a text.
        ValueError: the dataset is empty.
    """
    if isinstance(dataset, Mapping | str | bytes):
        given = f"the text {dataset!r}" if not isinstance(dataset, Mapping) else f"with the keys {list(dataset)}"
        remedy = "one split (`datasets['train']`)"
        if not isinstance(dataset, Mapping):
            remedy = "what the model says to a text (`attributor.predict(Dataset.from_list([{'text': text}]))`)"
        raise TypeError(
            f"`{name}` is a {type(dataset).__name__}, {given}. Expected a dataset whose element i is row i. Pass "
            f"{remedy}, load it from its name (`load_dataset(name, split='train')`), or make one of a single row "
            "(`Dataset.from_list([row])`)."
        )
    if dataset is None:
        raise TypeError(f"`{name}` is None. Expected a dataset whose element i is row i. Pass `{name}=...`.")
    if hasattr(dataset, "iloc"):
        raise TypeError(
            f"`{name}` is a {type(dataset).__name__}, whose element i is a column and not row i. Expected a dataset "
            "whose element i is row i. Convert it with `datasets.Dataset.from_pandas(frame, preserve_index=False)`."
        )
    if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        raise TypeError(
            f"`{name}` is a {type(dataset).__name__}, which has no length or no rows by index. Expected a "
            "map-style dataset, since scores refer to row numbers. Wrap a stream as `hf_trak.StreamedRows(stream, "
            "num_rows)`, or store its rows with `Dataset.from_generator`."
        )
    if len(dataset) == 0:
        raise ValueError(f"`{name}` is empty. Expected at least one row. Check how it was loaded or filtered.")
    return len(dataset)


def forward_columns(model: torch.nn.Module, label_names: Sequence[str] | None = None) -> list[str]:
    """List the dataset columns that `Trainer` would keep for a model: the arguments of `forward`, and labels.

    `labels` is always in the list, because tasks read labels even if `forward` does not take them.

    Args:
        model: the model, possibly wrapped by PEFT.
        label_names: names of label columns. By default those that `Trainer` infers from the class of the model.
    """
    wrapper: Any = model
    base = wrapper.get_base_model() if hasattr(model, "get_base_model") else model
    labels = find_labels(type(base)) if label_names is None else list(label_names)
    open_ended = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    arguments = [name for name, p in inspect.signature(base.forward).parameters.items() if p.kind not in open_ended]
    return list(dict.fromkeys([*arguments, "label", "label_ids", "labels", *labels]))


def default_collator(dataset: Any, processing_class: Any = None) -> Collator:
    """Choose the collator that `Trainer` would choose or, for a dataset of tuples, that of `torch.utils.data`.

    Args:
        dataset: a map-style dataset.
        processing_class: a tokenizer or feature extractor, which then pads the batches.

    Raises:
        TypeError: `processing_class` is a name.
    """
    if isinstance(processing_class, str):
        raise TypeError(
            f"`processing_class` is {processing_class!r}. Expected a tokenizer or processor. Load it by that name "
            "(`AutoTokenizer.from_pretrained(name)`)."
        )
    if isinstance(processing_class, PreTrainedTokenizerBase | SequenceFeatureExtractor):
        return DataCollatorWithPadding(processing_class)  # type: ignore[arg-type]  # as Trainer does
    if not isinstance(dataset, HFDataset) and isinstance(dataset[0], tuple | list):
        return torch_collate
    return default_data_collator


_PADDING = (DataCollatorWithPadding, DataCollatorForSeq2Seq, DataCollatorForTokenClassification, DefaultDataCollator)


def _always_the_same(dataset: Any, collator: Any) -> bool:
    """Tell whether rows are read from a table as they are stored, and padded by a collator of transformers."""
    while getattr(collator, "draws_nothing", False):
        collator = collator.collator
    stored = isinstance(dataset, HFDataset) and dataset.format["type"] != "custom"
    return stored and (collator is default_data_collator or type(collator) in _PADDING)


def checked_collator(collator: Any) -> Collator:
    """Return a data collator.

    Raises:
        TypeError: it is no function, or a tokenizer, which takes texts and no rows.
    """
    if callable(collator) and not isinstance(collator, PreTrainedTokenizerBase):
        return collator
    raise TypeError(
        f"`data_collator` is a {type(collator).__name__}. Expected a function that makes a batch of a list of rows. "
        "Pass a tokenizer as `processing_class=` instead, or one in a collator (`DataCollatorWithPadding(tokenizer)`)."
    )


def own_columns(collator: Any) -> tuple[str, ...]:
    """List the columns that a collator names in its attribute `columns`, also one inside of another (`collator`)."""
    found: list[str] = []
    while collator is not None:
        named = getattr(collator, "columns", ())
        found += named if isinstance(named, list | tuple) else ()
        collator = getattr(collator, "collator", None)
    return tuple(found)


def attribute_of(collator: Any, name: str) -> Any:
    """Return an attribute of a collator, or of the one inside of it (`collator`) that has it; `None` if none has."""
    while collator is not None:
        if (found := getattr(collator, name, None)) is not None:
            return found
        collator = getattr(collator, "collator", None)
    return None


class RowBatches:
    """Loads batches of given rows in a given order, collates them, and moves them to a device.

    Batches come in the order in which they were asked for, whatever the number of workers, so that rows need no column
    with their number.
    """

    def __init__(
        self,
        dataset: Any,
        collator: Collator,
        *,
        columns: Sequence[str] | None,
        device: torch.device,
        num_workers: int = 0,
        pin_memory: bool = False,
        limits: BatchLimits | None = None,
        draws: RowDraws | None = None,
        side: str = "train",
        images: ImageTokens | None = None,
    ) -> None:
        """
        Args:
            dataset: a map-style dataset.
            collator: turns a list of rows into a batch. Columns that it names are kept, too, see [`own_columns`].
            columns: names of the columns that are passed to the collator. `None` keeps all.
            device: the device that batches are moved to.
            num_workers: number of processes that load rows.
            pin_memory: pass batches through pinned memory.
            limits: sizes that the model is limited to. Every batch is checked against them.
            draws: how rows are drawn that come out of dataset or collator at random. `None` takes them as they come.
            side: `"train"` or `"target"`, whose draws are independent.
            images: the model's tokens of images, by which these are told apart. `None` leaves them as they come.

        Raises:
            ValueError: the dataset has none of the columns.
        """
        self.stored = stored_columns(dataset)
        self._given = dataset
        self._draws = draws
        self._images = images
        self._was_cut = False
        self._end_to_end: bool | None = None
        self._ready = attribute_of(collator, "ready")  # the collator's own preparation of rows, before these are cut
        if attribute_of(collator, "every_column"):
            columns = None
        if columns is not None:
            columns = [*columns, *own_columns(collator)]
        if columns is not None and isinstance(dataset, HFDataset) and dataset.format["type"] != "custom":
            # Drop unused columns before they are decoded, unless the dataset has a transform, which may need them.
            kept = [name for name in dataset.column_names if name in columns]
            _check_columns(kept, dataset.column_names, columns)
            dataset = dataset.select_columns(kept)
        self.dataset: Dataset = dataset
        self.collator = collator
        self.columns = None if columns is None else frozenset(columns)
        self.device = device
        self.num_workers = 0 if getattr(dataset, "sequential", False) else num_workers
        self.pin_memory = pin_memory
        self.limits = limits
        self._drawn_rows = DrawnRows(
            dataset, self._collate, (collator, dataset), 0 if draws is None else draws.seed, side
        )

    def _collate(self, rows: list[Any]) -> Any:
        if self.columns is not None and rows and isinstance(rows[0], Mapping):
            given = rows[0]
            rows = [{name: value for name, value in row.items() if name in self.columns} for row in rows]
            _check_columns(rows[0], given, self.columns)
        rows = rows if self._ready is None else self._ready(rows)
        check_rows(rows, self.collator, self.stored)
        made = as_batch(self.collator(rows))
        batch = cut_at_rows(made, rows)
        self._was_cut = batch is not made
        if self.limits is not None:
            self.limits.check(batch, self.stored)
        return batch if self._images is None else split_at_images(batch, rows, self._images)

    @property
    def drawn(self) -> bool:
        """Tell whether rows come out of dataset or collator at random, so that each is drawn with seeds of its own."""
        if self._draws is None:
            return False
        known = self._draws.known(self._given)
        return self.probe()[2] if known is None else known

    @property
    def draws(self) -> int:
        """Count the draws of each row: 1 for rows that are always the same."""
        return self._draws.count if self._draws is not None and self.drawn else 1

    def probe(self) -> tuple[Collate, list[int], bool]:
        """Find out whether rows come at random, by collating some of them.

        Each row is collated alone, since rows of different sizes need not fit into one batch. They are collated
        together if the collator takes no single row.

        Returns:
            What collates these rows, their numbers, and whether they come at random.

        Raises:
            ValueError: rows come at random, and are mixed with each other.
        """
        rows = probe_rows(len(self._given), sequential=getattr(self._given, "sequential", False))
        if self._draws is not None:
            self._draws.remember(self._given, False)
        collate: Collate = self._each_alone
        if len(rows) > 1:
            try:
                with generators_kept():
                    collate(rows[:1])
            except Exception as error:  # whatever a user's collator may raise; with no rows at all, it raises again
                logger.debug("The collator takes no single row (%r): probed rows are collated together.", error)
                collate = self.collated
        drawn = not _always_the_same(self._given, self.collator) and drawn_at_random(collate, rows)
        if self._draws is not None:
            self._draws.remember(self._given, drawn)
        if drawn and len(rows) > 2 and collate == self._each_alone:
            self._drawn_rows.check_apart(rows[:3])
        return collate, rows, drawn

    def _each_alone(self, rows: list[int]) -> dict[str, Any]:
        return {f"row {row}": self.collated([row]) for row in rows}

    def alike(self) -> Iterator[Any]:
        """Yield the batch of every row alone, with the same random numbers: equal rows give equal batches."""
        drawn = self.drawn  # asked once, since it looks at the rows
        for row in range(len(self._given)):
            yield self._drawn_rows.alike(row) if drawn else self.collated([row])

    def alone(self, row: int, draw: int = 0) -> Any:
        """Load the batch of a single row, on the device."""
        return send_to_device(self.collated([row], draw), self.device)

    def collated(self, rows: Sequence[int], draw: int = 0) -> Any:
        """Load and collate the batch of some rows in one of their draws, without moving it to the device."""
        if self.drawn:
            return self._drawn_rows.__getitems__([(row, draw) for row in rows])
        return self._collate(rows_at(self.dataset, rows))

    def cuts(self, rows: range, batch_size: int) -> list[Sequence[int]]:
        """Divide rows into batches. The division depends on these rows, the size and the collator alone.

        Rows of tokens come in the order of their lengths, longest first, where these are stored or the collator lays
        rows end to end: in another order, most of a batch of short and long rows would be padding. Rows of images, for
        models of images and text, are grouped by the sizes of these, since rows of different sizes cannot share a
        batch.

        Args:
            rows: consecutive row numbers.
            batch_size: rows in a batch.
        """
        if self._end_to_end is None:
            self._end_to_end = self._lays_end_to_end(rows)
        if self._end_to_end:
            return _cut_by_length(rows, [len(rows_at(self.dataset, [row])[0][TOKENS]) for row in rows], batch_size)
        if self._images is not None and self._images.image is not None and batch_size > 1:
            sizes = None if getattr(self.dataset, "sequential", False) else image_sizes(self.dataset, rows)
            if sizes is not None:
                alike: dict[Any, list[int]] = {}
                for row in rows:
                    alike.setdefault(sizes[row], []).append(row)
                return [cut for group in alike.values() for cut in _cut(group, batch_size)]
        elif 1 < batch_size < len(rows):
            lengths = row_lengths(self.dataset, rows)
            if lengths is not None and len(set(lengths)) > 1 and not self.drawn:
                return _cut_by_length(rows, lengths, batch_size)
        return list(batch_rows(rows.start, rows.stop, batch_size))

    def _lays_end_to_end(self, rows: range) -> bool | None:
        """Tell whether the collator makes one sequence of several rows, by the first two; `None` for a single one."""
        if len(rows) < 2:
            return None
        if getattr(self.dataset, "sequential", False) or self.drawn:
            return False
        first = [rows_at(self.dataset, [row])[0] for row in rows[:2]]
        if not all(isinstance(row, Mapping) and TOKENS in row for row in first):
            return False
        try:
            self._collate(first)
        except Exception as error:  # of rows that fit into no batch, which is refused when it comes to them
            logger.debug("Two rows do not make a batch: %r.", error)
            return False
        return self._was_cut

    def iterate(self, batches: Iterable[Sequence[int]], draws: int = 1) -> Iterator[tuple[list[int], Any]]:
        """Yield `(row numbers, batch)` for every list of row numbers in `batches`, the batch on the device.

        Rows with images of different sizes come in a batch for each size, see [`~hf_trak.data.images`].

        Args:
            batches: lists of row numbers.
            draws: number of draws of random rows, which come one after the other for each list of rows. Other rows
                come once.
        """
        cuts = [list(rows) for rows in batches]
        given: Any = self.dataset
        keys: Sequence[Any] = cuts
        collate: Callable[[Any], Any] = self._collate
        if self.drawn:
            cuts = [rows for rows in cuts for _ in range(draws)]
            keys = [[(row, place % draws) for row in rows] for place, rows in enumerate(cuts)]
            given, collate = self._drawn_rows, _as_it_is
        loader: DataLoader[Any] = DataLoader(
            given,
            batch_sampler=keys,
            collate_fn=collate,
            num_workers=self.num_workers,
            pin_memory=self.pin_memory,
            generator=torch.Generator(),  # which leaves the one that a training draws from alone
        )
        for rows, batch in zip(cuts, loader, strict=True):
            if not isinstance(batch, SplitRows):
                yield rows, send_to_device(batch, self.device)
                continue
            for places, part in batch:
                yield [rows[place] for place in places], send_to_device(part, self.device)


def _cut(rows: Sequence[int], batch_size: int) -> list[Sequence[int]]:
    return [rows[first : first + batch_size] for first in range(0, len(rows), batch_size)]


def _cut_by_length(rows: range, lengths: Sequence[int], batch_size: int) -> list[Sequence[int]]:
    """Divide rows into batches of similar lengths, and keep the order of rows of one length.

    The longest come first, so that a batch that is too large for the memory, and an engine that is wrong for a model,
    are noticed at once.
    """
    return _cut(sorted(rows, key=lambda row: -lengths[row - rows.start]), batch_size)


def _as_it_is(batch: Any) -> Any:
    return batch


_CHATS = {"messages": "tokenize_chat", "conversations": "tokenize_chat", "completion": "tokenize_prompt_completion"}
"""Columns of chats, and the functions that make tokens of them."""


_INPUTS = (TOKENS, "attention_mask", "pixel_values", "input_features", "input_values", "labels", "label")
"""Columns that most models take, which errors name where the model has some of them."""


def _check_columns(kept: Collection[str], given: Collection[str], columns: Collection[str]) -> None:
    if not kept:
        remedy = "Rename the columns"
        if TOKENS in columns and (chats := [name for name in _CHATS if name in given]):
            remedy = f"Make tokens of the chats with `hf_trak.data.language.{_CHATS[chats[0]]}`"
        elif TOKENS in columns:
            remedy = "Rename the columns, make tokens of texts as for the training (`attributor.predict` does)"
        known = [name for name in _INPUTS if name in columns]
        raise ValueError(
            f"No column of the dataset reaches the model: it has {sorted(given)}. Expected some of "
            f"{known or sorted(set(columns))}. {remedy}, or set `remove_unused_columns=False` if the data collator "
            "makes the model's inputs."
        )


def batch_rows(start: int, stop: int, batch_size: int) -> Iterator[range]:
    """Divide the rows `start … stop - 1` into batches. The division depends on the three arguments alone."""
    for first in range(start, stop, batch_size):
        yield range(first, min(first + batch_size, stop))


class LoaderCollator(WrappingCollator):
    """The collator of a `DataLoader`, which gets rows with all their columns, as the loader gives them."""

    every_column = True


def rows_of_loader(loader: Any, train_dataset: Any, data_collator: Collator | None) -> tuple[Any, Collator]:
    """Take rows and collator from a loader.

    Args:
        loader: a `DataLoader`, also one that Accelerate has prepared. In which order it gives rows does not matter.
        train_dataset, data_collator: what was given beside it: nothing.

    Returns:
        The dataset, and a collator.

    Raises:
        TypeError: it is no `DataLoader`, or loads a stream.
        ValueError: rows or a collator are given, too, or its sampler leaves rows out.
    """
    loader = getattr(loader, "base_dataloader", loader)  # of loaders that Accelerate dispatches or keeps state for
    if not isinstance(loader, DataLoader):
        raise TypeError(
            f"`dataloader` is a {type(loader).__name__}. Expected a `torch.utils.data.DataLoader`, whose rows and "
            "collator are taken. Pass the rows as `train_dataset`."
        )
    if train_dataset is not None or data_collator is not None:
        raise ValueError(
            "`dataloader` is given together with `train_dataset` or `data_collator`. Expected one or the other, since "
            "rows and collator are those of the loader. Leave out what is not meant."
        )
    if isinstance(loader.dataset, IterableDataset):
        raise TypeError(
            f"`dataloader` loads a {type(loader.dataset).__name__}, a stream without row numbers. Expected rows by "
            "index, since scores refer to row numbers. Wrap the stream as `hf_trak.StreamedRows(stream, num_rows)`, "
            "and pass it as `train_dataset`."
        )
    sampler = getattr(loader.batch_sampler, "sampler", loader.sampler)
    count = row_count(loader.dataset, "train_dataset")
    drawn = {int(row) for row in sampler.indices} if isinstance(sampler, SubsetRandomSampler) else range(count)
    if len(drawn) < count:
        raise ValueError(
            f"`dataloader` draws {len(drawn):,} of the {count:,} rows of its dataset, by a "
            f"{type(sampler).__name__}. Expected a dataset of the rows that were trained on, since all of it is "
            "attributed. Pass a loader of `torch.utils.data.Subset(dataset, indices)`."
        )
    if isinstance(sampler, WeightedRandomSampler):
        logger.warning(
            "`dataloader` draws rows by weights, so that the training saw some more often than others, or never. All "
            "rows of the dataset are attributed as if it had seen each equally often."
        )
    return loader.dataset, LoaderCollator(loader.collate_fn)


@dataclass(frozen=True)
class RowPart:
    """Rows of a dataset, in ascending order.

    Attributes:
        numbers: the numbers of the rows.
        total: number of rows of the dataset.
        held: rows that were fetched, from which these are taken; `None` takes them from the dataset itself.
    """

    numbers: tuple[int, ...]
    total: int
    held: "HeldRows | None" = None

    def __len__(self) -> int:
        return len(self.numbers)

    @property
    def whole(self) -> bool:
        """Tell whether these are all rows."""
        return len(self.numbers) == self.total

    @property
    def at_hand(self) -> bool:
        """Tell whether the rows were fetched, so that the dataset need not have them."""
        return self.held is not None

    @property
    def tag(self) -> str:
        """Hash the numbers to 12 hex digits; return an empty text for all rows."""
        return "" if self.whole else content_digest({"rows": list(self.numbers), "total": self.total})[:12]

    def of(self, dataset: Any) -> Any:
        """Return these rows of a dataset, in the way in which the dataset itself returns them.

        Args:
            dataset: a map-style dataset of `total` rows.
        """
        source = dataset if self.held is None else self.held
        if self.whole and self.held is None:
            return source
        return source.select(self.numbers) if hasattr(source, "select") else PartOfRows(source, self.numbers)


class PartOfRows(Subset[Any]):
    """Rows of a dataset that has no `select` of its own."""

    def __init__(self, dataset: Any, indices: Sequence[int]) -> None:
        """
        Args:
            dataset: a map-style dataset.
            indices: numbers of the rows, ascending.
        """
        super().__init__(dataset, indices)
        self.sequential = getattr(dataset, "sequential", False)
        """Whether rows are to be read in this process and forwards, as those of a stream."""


class HeldRows:
    """Rows that were fetched, under the numbers that they have in a dataset which is not at hand as a whole."""

    def __init__(self, rows: Any, numbers: Sequence[int], total: int) -> None:
        """
        Args:
            rows: the rows, a `datasets.Dataset`.
            numbers: their numbers, ascending.
            total: number of rows of the dataset.
        """
        self.rows = rows
        self.total = total
        self._places = {number: place for place, number in enumerate(numbers)}

    def __len__(self) -> int:
        return self.total

    def __getitem__(self, number: int) -> Any:
        return self.rows[self._places[number]]

    def select(self, numbers: Sequence[int]) -> Any:
        """Return some of the rows, by their numbers, as a `datasets.Dataset`."""
        return self.rows.select([self._places[number] for number in numbers])
