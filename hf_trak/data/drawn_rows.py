"""Rows that a transform or a collator draws at random: one batch for every list of rows and number of a draw.

A collator draws for a whole batch at once, so that what a row gets would depend on the rows beside it. So each row is
read and collated alone, with seeds of its own (`generators`), and the batches of single rows are joined (`joining`).
"""

import copy
from collections.abc import Callable, Sequence
from typing import Any

from hf_trak.data.generators import generators_kept, held_generators, set_generators
from hf_trak.data.joining import joined

_KNOWN_DATASETS = 16


class RowDraws:
    """How often and with which seed random rows are drawn, and of which datasets it is known whether they are random.

    Attributes:
        seed (`int`): seed of the run.
        count (`int`): number of draws of each random row.
    """

    def __init__(self, seed: int = 0, count: int = 1) -> None:
        """
        Args:
            seed: seed of the run.
            count: number of draws of each random row.
        """
        self.seed = seed
        self.count = count
        self._known: dict[int, tuple[Any, bool]] = {}

    def known(self, dataset: Any) -> bool | None:
        """Tell whether rows of a dataset are drawn at random; `None` if nobody has found out."""
        found = self._known.get(id(dataset))
        return None if found is None else found[1]

    def remember(self, dataset: Any, drawn: bool) -> None:
        """Keep what was found out about a dataset, which is kept alive with it."""
        self._known.pop(id(dataset), None)
        self._known[id(dataset)] = dataset, drawn
        if len(self._known) > _KNOWN_DATASETS:
            del self._known[next(iter(self._known))]


class DrawnRows:
    """A dataset of batches, whose keys are lists of `(row, draw)`."""

    def __init__(
        self, dataset: Any, collate: Callable[[list[Any]], Any], sources: Sequence[Any], seed: int, side: str
    ) -> None:
        """
        Args:
            dataset: the rows.
            collate: makes a batch of rows.
            sources: what may hold random generators of its own: collators and datasets.
            seed: seed of the run.
            side: `"train"` or `"target"`.
        """
        self._dataset = dataset
        self._collate = collate
        self._sources = tuple(sources)
        self._seed = seed
        self._side = side
        self._began = False
        self._last: dict[int, Any] = {}

    def __getitems__(self, keys: Sequence[tuple[int, int]]) -> Any:
        """Make the batch of some rows, each in one of its draws.

        Args:
            keys: pairs of row and draw.

        Raises:
            ValueError: the batches of single rows cannot be joined.
        """
        own = held_generators(*self._sources)
        with generators_kept(own):
            if not self._began:  # a generator may be made by the first call, as by collators with a seed
                self._drawn(keys[0][0])
                own = held_generators(*self._sources)
                self._began = True
            rows, singles = [], []
            for row, draw in keys:
                set_generators(self._seed, self._side, row, draw, own)
                value, single = self._drawn(row)
                rows.append(value)
                singles.append(single)
            if getattr(self._dataset, "sequential", False):
                self._last = {row: value for (row, _), value in zip(keys, rows, strict=True)}
            return joined(singles, lambda: self._collate([copy.copy(value) for value in rows]))

    def _drawn(self, row: int) -> tuple[Any, Any]:
        """Read a row, and collate it alone."""
        if row in self._last:  # a stream need not start again for every draw
            value = self._last[row]
        else:
            fetch = getattr(self._dataset, "__getitems__", None)
            value = self._dataset[row] if fetch is None else fetch([row])[0]
        try:
            return value, self._collate([copy.copy(value)])
        except Exception as error:
            error.add_note("Rows come at random, so that each is collated alone, with seeds of its own.")
            raise
