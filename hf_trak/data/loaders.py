"""Training rows and collator of a `DataLoader`, for training loops of one's own."""

from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from hf_trak.data.rows import Collator


class LoaderCollator:
    """The collator of a `DataLoader`, which gets rows with all their columns, as the loader gives them."""

    every_column = True

    def __init__(self, collator: Collator) -> None:
        """
        Args:
            collator: the `collate_fn`.
        """
        self.collator = collator

    def __call__(self, rows: list[Any]) -> Any:
        """Collate rows into a batch."""
        return self.collator(rows)


def rows_of_loader(loader: Any, train_dataset: Any, data_collator: Collator | None) -> tuple[Any, Collator]:
    """Take rows and collator from a loader.

    Args:
        loader: a `DataLoader`, also one that Accelerate has prepared. In which order it gives rows does not matter.
        train_dataset, data_collator: what was given beside it: nothing.

    Returns:
        The dataset, and a collator.

    Raises:
        TypeError: it is no `DataLoader`, or loads a stream.
        ValueError: rows or a collator are given, too.
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
    return loader.dataset, LoaderCollator(loader.collate_fn)
