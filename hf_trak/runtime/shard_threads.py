"""Shards worked on side by side, one per core.

Opening, checking and hashing a shard take as long as multiplying it does, and none of that is spread over cores by the
operators of torch. Shards are: each thread works on one of its own, with operators that keep to one core. Their bits
then do not depend on the number of threads either.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import torch

T = TypeVar("T")
R = TypeVar("R")


def map_shards(function: Callable[[T], R], things: Iterable[T]) -> Iterator[R]:
    """`function` of every thing, in their order, as many at a time as torch has threads (`torch.get_num_threads`).

    Args:
        function: called in threads whose torch operators use one core each; without any, where torch has one.
        things: what it is called with.

    Returns:
        An iterator of results. One more than there are threads is held at a time, and torch keeps to one core in the
        calling thread until the iterator ends or is closed. An error of `function` is raised in the place of its
        result.
    """
    threads = torch.get_num_threads()
    if threads == 1:
        yield from map(function, things)
        return
    pool = ThreadPoolExecutor(threads, "shards", initializer=torch.set_num_threads, initargs=(1,))
    held: deque[Future[R]] = deque()
    torch.set_num_threads(1)  # what the caller does with results meanwhile would wait for cores that are taken
    try:
        for thing in things:
            held.append(pool.submit(function, thing))
            if len(held) > threads:
                yield held.popleft().result()
        while held:
            yield held.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)
        # The number is a thread's own, but the last one set is also that of threads that are started from now on.
        torch.set_num_threads(threads)
