"""Shards processed in parallel, one per core.

Opening, checking and hashing a shard takes as long as multiplying it, and torch's operators spread none of that over
cores. So each thread processes a shard of its own, with operators that use one core. The bits of the results then do
not depend on the number of threads either.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import torch

T = TypeVar("T")
R = TypeVar("R")


def map_shards(function: Callable[[T], R], items: Iterable[T]) -> Iterator[R]:
    """Apply `function` to each item on a thread pool, and yield the results in the order of the items.

    Args:
        function: called in as many threads as torch has (`torch.get_num_threads`), whose torch operators use one core
            each; called in the calling thread if torch has one thread.
        items: the arguments of the calls.

    Returns:
        An iterator of results. At most one more result than there are threads is held at a time, and torch uses one
        core in the calling thread until the iterator ends or is closed.

    Raises:
        Exception: an error of `function` is raised in the place of its result.
    """
    threads = torch.get_num_threads()
    if threads == 1:
        yield from map(function, items)
        return
    pool = ThreadPoolExecutor(threads, "shards", initializer=torch.set_num_threads, initargs=(1,))
    held: deque[Future[R]] = deque()
    torch.set_num_threads(1)  # what the caller does between results would compete for cores that are in use
    try:
        for item in items:
            held.append(pool.submit(function, item))
            if len(held) > threads:
                yield held.popleft().result()
        while held:
            yield held.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)
        # Each thread has its own number, but threads that start from now on take the last one that was set anywhere.
        torch.set_num_threads(threads)
