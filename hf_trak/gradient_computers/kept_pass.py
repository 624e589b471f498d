"""The pass in which an engine is checked, kept for the sink that the batch is meant for.

The check looks at two samples of a batch while the engine computes all of them. Where they are small, they are held
until they have passed, and go to the sink then: the first batch is computed once.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from hf_trak.gradient_computers.base import BatchOutputs, GradientSink
from hf_trak.gradient_computers.hooked.outer import OuterBlock, OuterSink

KEPT_BYTES = 2**26
"""Bytes of a batch's gradients up to which a checked pass is kept."""


@dataclass
class KeptPass:
    """Blocks of one pass over a batch.

    Attributes:
        blocks: their first columns, and the blocks or their factors.
        outputs: the other results of the pass; `None` as long as it has not come to its end.
        held_bytes: bytes of the blocks.
    """

    blocks: list[tuple[int, Tensor | OuterBlock]] = field(default_factory=list)
    outputs: BatchOutputs | None = None
    held_bytes: int = 0

    def keep(self, start: int, block: Tensor | OuterBlock) -> None:
        """Copy a block, unless there are too many bytes by now."""
        parts = (block,) if isinstance(block, Tensor) else (block.left, block.right)
        self.held_bytes += sum(part.numel() * part.element_size() for part in parts)
        if self.held_bytes > KEPT_BYTES:
            self.blocks.clear()
            return
        copies = [part.clone() for part in parts]
        self.blocks.append((start, copies[0] if isinstance(block, Tensor) else OuterBlock(*copies)))

    def hand_on(self, sink: GradientSink, device: torch.device | str | None) -> BatchOutputs | None:
        """Push the blocks into the sink.

        Args:
            sink: the one whose `takes_outer` the pass was asked for.
            device: where it wants them; `None` leaves them where they are.

        Returns:
            [`BatchOutputs`] or `None`: `None` if the pass was not kept, and nothing was pushed.
        """
        if self.outputs is None or self.held_bytes > KEPT_BYTES:
            return None
        for start, block in self.blocks:
            if isinstance(block, Tensor):
                sink(start, block.to(device=device))
            else:
                assert isinstance(sink, OuterSink)  # no one else is given factors
                sink.add_outer(start, block.left.to(device=device), block.right.to(device=device))
        return self.outputs
