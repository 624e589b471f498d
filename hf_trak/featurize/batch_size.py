"""Finding the largest batch that fits into memory by trying (`auto_find_batch_size`, as `Trainer` names it)."""

import logging
from collections.abc import Callable
from pathlib import Path

from accelerate.utils.memory import clear_device_cache

from hf_trak.errors import StoreError
from hf_trak.gradient_computers.memory import is_out_of_memory
from hf_trak.store.sealed import read_sealed, write_sealed

logger = logging.getLogger(__name__)

FILE_NAME = "batch_size.json"
_FACTOR = 0.9


class BatchSizeFinder:
    """Call a function of the batch size, again with a smaller one whenever it runs out of memory.

    The size is multiplied by 0.9 after each failure, as `accelerate.utils.find_executable_batch_size` does. The size
    found is kept in `<output_dir>/batch_size.json`, where later calls, checkpoints, processes and runs begin: a run
    that is interrupted afterwards and resumed cuts its batches as it would have done without the interruption.
    Shards are computed with one batch size each; those that were finished before the first failure stay as they
    are, since batches change features by rounding only. To search again, delete the file.
    """

    def __init__(self, batch_size: int, output_dir: Path) -> None:
        """
        Args:
            batch_size: where the search begins unless a smaller size has been found before.
            output_dir: the directory of the feature store.
        """
        self.path = output_dir / FILE_NAME
        self.batch_size = min(batch_size, self._recorded() or batch_size)

    def run(self, function: Callable[[int], None]) -> None:
        """Call `function(batch_size)` until it does not run out of memory; it is to skip what it has done already.

        Raises:
            The out-of-memory error itself, if one row is too many.
        """
        while True:
            try:
                return function(self.batch_size)
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                if self.batch_size == 1:
                    error.add_note(
                        "Not even one row fits into memory (`auto_find_batch_size`). Attribute fewer parameters "
                        "(`grad_wrt`), shorten the rows, or use a device with more memory."
                    )
                    raise
            # Only here, when the error and the frames that it refers to are gone, can their memory be given back.
            clear_device_cache(garbage_collection=True)
            smaller = max(1, int(self.batch_size * _FACTOR))
            logger.warning("Batches of %d rows do not fit into memory; trying %d.", self.batch_size, smaller)
            self.batch_size = min(smaller, self._recorded() or smaller)
            write_sealed(self.path, {"batch_size": self.batch_size})

    def _recorded(self) -> int | None:
        try:
            found = read_sealed(self.path, "Delete this file.").get("batch_size")
        except FileNotFoundError:
            return None
        if not isinstance(found, int) or isinstance(found, bool) or found < 1:
            raise StoreError(f"{self.path} says {found!r}. Expected a batch size of at least 1. Delete this file.")
        return found
