"""Passes through a model that is divided over processes, which have to make the same number of them.

Gathering a layer takes all processes. So a process without rows of its own makes passes over some batch whose result
it drops, until the others are through, and a process that fails says so where the others listen.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch import Tensor

from hf_trak.errors import PeerProcessError
from hf_trak.runtime.processes import Processes
from hf_trak.runtime.sharding import RowDivision

STEP, DONE = "step", "done"
_FAILED = "failed: "


def lost_contact(error: BaseException | None) -> bool:
    """Tell whether an error comes from a connection to a process that has ended.

    torch 2.15: errors of gloo have no class of their own, and name the source file that they come from.
    """
    while error is not None:
        if isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "/gloo/" in str(error)):
            return True
        error = error.__cause__ or error.__context__
    return False


class Lockstep:
    """Keeps the processes of a sharded model at the same pass.

    All processes enter a [`~Lockstep.region`]. In it, each begins a pass by a word, such as `STEP`, and says further
    words within it, by [`~Lockstep.exchange`]. Those that are done first accompany the others.

    Attributes:
        division ([`RowDivision`]): which processes work on the same rows.
    """

    def __init__(self, processes: Processes, division: RowDivision | None = None) -> None:
        """
        Args:
            processes: the processes that hold the model.
            division: which of them work on the same rows; by default each on its own.
        """
        self._processes = processes
        self.division = division or RowDivision.by_process(processes)
        self._told = False
        self._depth = 0

    def exchange(self, word: str) -> list[str]:
        """Tell all processes a word, and hear theirs, by rank.

        Raises:
            PeerProcessError: another process has failed, or died.
        """
        words = self._processes.gather(word)
        failed = [(rank, one) for rank, one in enumerate(words) if one.startswith(_FAILED)]
        if failed:
            self._told = True
            rank, reason = failed[0]
            if not word.startswith(_FAILED):
                raise PeerProcessError(
                    f"Process {rank} of {self._processes.num_processes} failed in its pass through the model, with "
                    f"{reason.removeprefix(_FAILED)} Expected all to finish, since each holds a part of the model. "
                    "Resolve that error and run the same command again; files that were written stay valid."
                )
        return words

    def add(self, tensor: Tensor) -> Tensor:
        """Sum a CPU tensor over all processes, in place. Raises as `exchange`."""
        return self._processes.add(tensor)

    def total(self, tensor: Tensor) -> Tensor:
        """Sum a CPU tensor over all processes in the order of their ranks. Raises as `exchange`."""
        first, *others = self._processes.gather_tensors(tensor)
        total = first.clone()
        for one in others:
            total += one
        return total

    @contextmanager
    def region(self, accompany: Callable[[list[str]], None]) -> Iterator[None]:
        """Return a context in which processes may make different numbers of passes.

        Args:
            accompany: makes one pass whose result is dropped, after processes have begun it by these words.

        Raises:
            PeerProcessError: another process failed or died. A process that fails itself raises its own error.
        """
        if self._depth or self._processes.num_processes == 1:
            yield
            return
        self._depth, self._told = 1, False
        try:
            yield
            while set(words := self.exchange(DONE)) != {DONE}:
                accompany(words)
        except Exception as error:
            gone = lost_contact(error)
            if gone or (not self._told and len(self.division.ranks) > 1):
                # Others may wait for this process within a layer, and do not listen to words: it has to end first.
                lost = self._processes.lost(error, " in its pass through the model")
                lost.__cause__ = error
                self._processes.give_up(lost)
                if gone and not isinstance(error, PeerProcessError):
                    raise lost from error
                raise
            if not self._told:  # the others are waiting for a word
                try:
                    self.exchange(f"{_FAILED}{type(error).__name__}: {error}")
                except PeerProcessError as peer:  # which is why the pass failed
                    raise peer from error
            raise
        finally:
            self._depth = 0
