"""The progress bars of `datasets`, switched off while rows of single batches are prepared."""

from collections.abc import Iterator
from contextlib import contextmanager

from datasets import disable_progress_bars, enable_progress_bars
from datasets.utils import are_progress_bars_disabled


@contextmanager
def no_progress_bars() -> Iterator[None]:
    """Return a context in which `datasets` shows no bars. Afterwards it is as it was before."""
    silent = are_progress_bars_disabled()
    disable_progress_bars()
    try:
        yield
    finally:
        if not silent:
            enable_progress_bars()
