"""Communication between the processes of a run. With one process nothing is sent and nothing waits.

Messages are small (shard numbers, reports, top-k lists, one Gram matrix) and go over gloo on the CPU, whatever backend
training uses. Its waits may last as long as the slowest process computes, and when a process dies, the processes that
wait for it notice at once instead of after a timeout of hours.
"""

import json
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from accelerate import PartialState
from torch import Tensor

from hf_trak._compat import set_group_timeout
from hf_trak.errors import PeerProcessError
from hf_trak.runtime.operator_threads import one_core

T = TypeVar("T")


LONGEST_WAIT = timedelta(days=1)

"""Longest wait of a process for another one that is running but does not answer. Once they have connected, the death
of a process is noticed at once."""


_MEETING_WAIT = timedelta(minutes=5)

"""Longest wait of processes for each other to connect, at a time when none of them has long computations to do."""


class Processes:
    """The processes started by `accelerate launch` or `torchrun`, or this one alone.

    Every method except [`~Processes.share`] must be called by all processes, in the same order.

    Attributes:
        device: the device of this process.
        process_index: the number of this process.
        num_processes: the number of processes.
    """

    def __init__(self, use_cpu: bool = False) -> None:
        """
        Args:
            use_cpu: whether to stay on the CPU even if the machine has an accelerator.
        """
        state = PartialState(cpu=use_cpu)
        self.device: torch.device = state.device
        self.process_index: int = state.process_index
        self.num_processes: int = state.num_processes
        self._group: Any = None
        self._given_up: Exception | None = None

    @property
    def is_main_process(self) -> bool:
        """Tell whether this is the process of rank 0."""
        return self.process_index == 0

    def share(self, count: int) -> range:
        """Return the part of `count` items that falls to this process: contiguous, in the order of ranks."""
        return share_of(count, self.process_index, self.num_processes)

    def wait_for_everyone(self) -> None:
        """Wait until every process has called this.

        Raises:
            PeerProcessError: another process died or stopped answering.
        """
        self.gather(None)

    def gather(self, value: Any) -> list[Any]:
        """Gather one plain JSON value from each process.

        Returns:
            The values by rank.

        Raises:
            PeerProcessError: another process died or stopped answering.
        """
        if self.num_processes == 1:
            return [value]
        data = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        sizes = self.gather_tensors(torch.tensor([len(data)]))
        padded = torch.zeros(int(max(sizes)), dtype=torch.uint8)
        padded[: len(data)] = data
        received = self.gather_tensors(padded)
        return [json.loads(part[: int(n)].numpy().tobytes()) for part, n in zip(received, sizes, strict=True)]

    def gather_tensors(self, tensor: Tensor) -> list[Tensor]:
        """Gather one CPU tensor from each process, all of the same shape and dtype. Returns and raises as `gather`."""
        if self.num_processes == 1:
            return [tensor]
        result = [torch.empty_like(tensor) for _ in range(self.num_processes)]
        with self._connection():
            dist.all_gather(result, tensor.contiguous(), group=self._group)
        return result

    def add(self, tensor: Tensor) -> Tensor:
        """Sum a CPU tensor over all processes, in place, in an order that may vary. Raises as `gather`."""
        return self._reduced(tensor, dist.ReduceOp.SUM)

    def maximum(self, tensor: Tensor) -> Tensor:
        """Take the elementwise maximum of a CPU tensor over all processes, in place. Raises as `gather`."""
        return self._reduced(tensor, dist.ReduceOp.MAX)

    def _reduced(self, tensor: Tensor, how: Any) -> Tensor:
        if self.num_processes > 1:
            with self._connection():
                dist.all_reduce(tensor, how, group=self._group)
        return tensor

    def give_up(self, error: Exception) -> None:
        """Mark the process group as broken: every later exchange raises at once.

        Args:
            error: the error.
        """
        self._given_up = error

    def broadcast_from_main(self, function: Callable[[], T]) -> T:
        """Call a function in the main process, and return its result in every process.

        Args:
            function: returns plain JSON.

        Raises:
            PeerProcessError: the call failed. The main process itself raises the error of `function`.
        """
        if self.num_processes == 1:
            return function()
        value: Any = None
        with self.all_or_none():
            if self.is_main_process:
                value = function()
        return self.gather(value)[0]

    def broadcast_tensor_from_main(self, function: Callable[[], Tensor], shape: tuple[int, ...]) -> Tensor:
        """Call a function in the main process, and return its result, a CPU tensor in float64, in every process.

        Args:
            function: returns the tensor.
            shape: its shape.

        Raises:
            PeerProcessError: the call failed. The main process itself raises the error of `function`.
        """
        if self.num_processes == 1:
            return function()
        tensor = torch.empty(shape, dtype=torch.float64)
        with self.all_or_none():
            if self.is_main_process:
                tensor = function().double().contiguous()
        with self._connection():
            dist.broadcast(tensor, src=0, group=self._group)
        return tensor

    @contextmanager
    def all_or_none(self) -> Iterator[None]:
        """Make a block succeed in every process or fail in every process. It must not contain other exchanges.

        Raises:
            PeerProcessError: the block failed in another process; quotes its error. A process in which the block
                itself failed raises that error.
        """
        if self.num_processes == 1:
            yield
            return
        failure: Exception | None = None
        try:
            yield
        except Exception as error:  # reported to the other processes, then raised
            failure = error
        try:
            reports = self.gather(None if failure is None else f"{type(failure).__name__}: {failure}")
        except PeerProcessError:
            if failure is not None:
                raise failure from None
            raise
        if failure is not None:
            raise failure
        failed = {rank: report for rank, report in enumerate(reports) if report is not None}
        if failed:
            rank, report = next(iter(failed.items()))
            raise PeerProcessError(
                f"{len(failed)} of {self.num_processes} processes failed; the first, number {rank}, with {report} "
                "Expected all to finish. Resolve that error and run the same command again; files that were written "
                "stay valid."
            )

    @contextmanager
    def _connection(self) -> Iterator[None]:
        if self._given_up is not None:
            raise self._given_up
        try:
            if self._group is None:
                # `new_group` notices the death of a process only after the whole timeout, gloo's barrier at once.
                # Barriers of other backends do not, so that there it takes up to the timeout.
                if dist.get_backend() == dist.Backend.GLOO:
                    dist.barrier()
                group: Any = dist.new_group(backend="gloo", timeout=_MEETING_WAIT)
                set_group_timeout(group, LONGEST_WAIT)
                self._group = group
            yield
        except RuntimeError as error:  # torch.distributed has no narrower class for a lost peer
            raise self.lost(error) from error

    def lost(self, error: Exception, where: str = "") -> PeerProcessError:
        """Make the error of a process that has lost contact with the others.

        Args:
            error: what tells that it has.
            where: the place in the run.
        """
        return PeerProcessError(
            f"Process {self.process_index} of {self.num_processes} lost contact with the others{where} ({error}). "
            "Expected them to run to the end: look at the output of the process that was killed, failed, or ran out "
            "of memory. Then run the same command again, with any number of processes; files that were written stay "
            "valid."
        )


def share_of(count: int, index: int, parts: int) -> range:
    """Return part `index` of `count` items that are cut into contiguous parts, whose sizes differ by at most one."""
    return range(count * index // parts, count * (index + 1) // parts)


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
    with one_core() as threads:  # what the caller does between results would compete for cores that are in use
        if threads == 1:
            yield from map(function, items)
            return
        pool = ThreadPoolExecutor(threads, "shards", initializer=torch.set_num_threads, initargs=(1,))
        held: deque[Future[R]] = deque()
        try:
            for item in items:
                held.append(pool.submit(function, item))
                if len(held) > threads:
                    yield held.popleft().result()
            while held:
                yield held.popleft().result()
        finally:
            pool.shutdown(cancel_futures=True)
