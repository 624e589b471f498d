"""What the processes of a run tell each other. With one process nothing is sent and nobody waits.

Everything that travels is small (shard numbers, reports, top-k lists, one Gram matrix) and goes over gloo on the CPU,
beside whatever backend training uses: its waits may last as long as the slowest process computes, and when a process
dies, those that wait for it learn so at once instead of after a timeout of hours.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from accelerate import PartialState
from torch import Tensor

from hf_trak.errors import PeerProcessError

T = TypeVar("T")

LONGEST_WAIT = timedelta(days=1)
"""How long a process waits for one that lives but does not answer. A dead one is noticed at once, once they have
connected."""

_MEETING_WAIT = timedelta(minutes=5)
"""How long processes wait for each other to connect, when none has much else to do."""


class Processes:
    """The processes started by `accelerate launch` or `torchrun`, or this one alone.

    Every method but the properties, [`~Processes.share`] and `device` has to be called by all of them, in the same
    order.
    """

    def __init__(self, use_cpu: bool = False) -> None:
        """
        Args:
            use_cpu: stay on the CPU even where there is an accelerator.
        """
        self._state = PartialState(cpu=use_cpu)
        self._group: Any = None

    @property
    def device(self) -> torch.device:
        """The device of this process."""
        return self._state.device

    @property
    def process_index(self) -> int:
        """Rank of this process among all, over all nodes."""
        return self._state.process_index

    @property
    def num_processes(self) -> int:
        """Number of processes over all nodes."""
        return self._state.num_processes

    @property
    def is_main_process(self) -> bool:
        """Whether this is the process of rank 0."""
        return self.process_index == 0

    def share(self, count: int) -> range:
        """The part of `count` things that falls to this process: contiguous, in the order of ranks."""
        return share_of(count, self.process_index, self.num_processes)

    def wait_for_everyone(self) -> None:
        """Return when every process has come here."""
        self.gather(None)

    def gather(self, value: Any) -> list[Any]:
        """Plain JSON values of all processes, by rank."""
        if self.num_processes == 1:
            return [value]
        data = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        sizes = self.gather_tensors(torch.tensor([len(data)]))
        padded = torch.zeros(int(max(sizes)), dtype=torch.uint8)
        padded[: len(data)] = data
        received = self.gather_tensors(padded)
        return [json.loads(part[: int(n)].numpy().tobytes()) for part, n in zip(received, sizes, strict=True)]

    def gather_tensors(self, tensor: Tensor) -> list[Tensor]:
        """CPU tensors of all processes, by rank; of one shape and dtype."""
        if self.num_processes == 1:
            return [tensor]
        result = [torch.empty_like(tensor) for _ in range(self.num_processes)]
        with self._contact():
            dist.all_gather(result, tensor.contiguous(), group=self._group)
        return result

    def add(self, tensor: Tensor) -> Tensor:
        """Sum over all processes, in place, on the CPU. Exact only where no addition rounds."""
        if self.num_processes > 1:
            with self._contact():
                dist.all_reduce(tensor, dist.ReduceOp.SUM, group=self._group)
        return tensor

    def maximum(self, tensor: Tensor) -> Tensor:
        """Elementwise maximum over all processes, in place, on the CPU."""
        if self.num_processes > 1:
            with self._contact():
                dist.all_reduce(tensor, dist.ReduceOp.MAX, group=self._group)
        return tensor

    def broadcast_from_main(self, function: Callable[[], T]) -> T:
        """What `function` (plain JSON) gives in the main process, in every process; it is called there alone.

        Raises:
            PeerProcessError: it failed there. The main process itself raises the error of `function`.
        """
        if self.num_processes == 1:
            return function()
        value: Any = None
        with self.all_or_none():
            if self.is_main_process:
                value = function()
        return self.gather(value)[0]

    def broadcast_tensor_from_main(
        self, function: Callable[[], Tensor], shape: tuple[int, ...], dtype: torch.dtype
    ) -> Tensor:
        """The same for a CPU tensor of known shape and dtype.

        Raises:
            PeerProcessError: as `broadcast_from_main`.
        """
        if self.num_processes == 1:
            return function()
        tensor = torch.empty(0)
        with self.all_or_none():
            tensor = function().to(dtype).contiguous() if self.is_main_process else torch.empty(shape, dtype=dtype)
        with self._contact():
            dist.broadcast(tensor, src=0, group=self._group)
        return tensor

    @contextmanager
    def all_or_none(self) -> Iterator[None]:
        """A block that succeeds in every process or fails in every process. It must not contain other exchanges.

        Raises:
            PeerProcessError: it failed in another process; quotes the error. A process in which it failed itself
                raises that error.
        """
        if self.num_processes == 1:
            yield
            return
        failure: Exception | None = None
        try:
            yield
        except Exception as error:  # told to the others, then raised
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
                "Expected all to finish. What has been written stays valid: see to that error, and run the same "
                "command again."
            )

    @contextmanager
    def _contact(self) -> Iterator[None]:
        try:
            if self._group is None:
                # `new_group` notices a process that has died since they met only after the whole wait, gloo's barrier
                # at once. Other backends' barriers do not, and there it takes up to the wait.
                if dist.get_backend() == dist.Backend.GLOO:
                    dist.barrier()
                group: Any = dist.new_group(backend="gloo", timeout=_MEETING_WAIT)
                dist.distributed_c10d._set_pg_timeout(LONGEST_WAIT, group)
                self._group = group
            yield
        except RuntimeError as error:  # all that torch.distributed raises when a peer is gone
            raise PeerProcessError(
                f"Process {self.process_index} of {self.num_processes} lost contact with the others ({error}). "
                "Expected them to run to the end: one was killed, failed, or ran out of memory; its own output says "
                "why. What has been written stays valid: run the same command again, with any number of processes."
            ) from error


def share_of(count: int, index: int, parts: int) -> range:
    """Part `index` of `count` things cut into `parts` contiguous parts, whose sizes differ by one at most."""
    return range(count * index // parts, count * (index + 1) // parts)
