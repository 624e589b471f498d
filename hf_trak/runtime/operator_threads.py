"""Loops of many small torch operators, run so that no operator waits for another thread.

torch spreads every large elementwise operator over its threads and waits for the last of them. A loop of a thousand
such operators waits a thousand times, and where another process holds a core, each wait lasts until the operating
system runs the missing thread again: milliseconds, for work of microseconds. Here each thread runs the whole loop for
its own samples, with operators that use one core, and they meet once, at the end.
"""

import os
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager

import torch

_SMALLEST_PART = 4  # samples of tiny operators: with fewer, threads would wait for Python's lock most of the time


class _Pool:
    """The threads of this process beside the calling one, started when they are first needed."""

    def __init__(self) -> None:
        self._executor: ThreadPoolExecutor | None = None
        self._size = 0
        self._lock = threading.Lock()

    def of(self, size: int) -> ThreadPoolExecutor:
        """Return a pool of at least `size` threads, all of them started and with operators that use one core."""
        with self._lock:
            if self._executor is None or self._size < size:
                if self._executor is not None:
                    self._executor.shutdown()
                started = threading.Barrier(size + 1)
                self._executor = ThreadPoolExecutor(
                    size, "operators", initializer=torch.set_num_threads, initargs=(1,)
                )
                for _ in range(size):
                    self._executor.submit(started.wait)
                started.wait()
                self._size = size
            return self._executor

    def forget(self) -> None:
        """Drop the threads without waiting for them: a forked process has none of its parent's."""
        self.__init__()  # type: ignore[misc]


_pool = _Pool()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_pool.forget)


@contextmanager
def one_core() -> Iterator[int]:
    """Let the torch operators of the calling thread use one core. Yields the number of threads that torch had."""
    threads = torch.get_num_threads()
    if threads == 1:
        yield threads
        return
    torch.set_num_threads(1)
    try:
        yield threads
    finally:
        # Each thread has its own number, but threads that start from now on take the last one that was set anywhere.
        torch.set_num_threads(threads)


def over_samples(loop: Callable[[int, int], None], size: int, tiny: bool = False) -> None:
    """Run a loop of small operators for all samples of a batch, divided among as many threads as torch has.

    Args:
        loop: called with `(first, last)` for single samples, or for all of them, or for stretches of tiny ones. What
            it does for a sample must not depend on the stretch that the sample is in, nor on the thread.
        size: B, number of samples.
        tiny: whether an operator takes microseconds for one sample. Then a thread has at least four samples, and there
            are half as many threads, since those of torch's own last operator are still spinning for a while: the
            calling thread alone where torch has up to three, or the batch up to seven samples.

    Raises:
        Exception: the first error of `loop`, after every thread has ended.
    """
    with one_core() as threads:
        parts = max(1, min(threads // 2, size // _SMALLEST_PART) if tiny else min(threads, size))
        if parts == 1:
            loop(0, size)
            return
        # With one sample at a time, a thread that the operating system runs late leaves more of them to the others.
        count = parts if tiny else size
        stretches = deque((size * part // count, size * (part + 1) // count) for part in range(count))
        inference, gradients = torch.is_inference_mode_enabled(), torch.is_grad_enabled()

        def work() -> None:
            while True:
                try:
                    stretch = stretches.popleft()
                except IndexError:
                    return
                loop(*stretch)

        def in_thread() -> None:
            with torch.inference_mode(inference), torch.set_grad_enabled(gradients and not inference):
                work()

        others = [_pool.of(parts - 1).submit(in_thread) for _ in range(1, parts)]
        try:
            work()
        finally:
            wait(others)  # they write to memory of the caller
        for other in others:
            other.result()
