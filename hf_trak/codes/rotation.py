"""The random rotation `hadamard-1` of rows of features, defined in `reference.py`."""

import torch
from torch import Tensor

from hf_trak._ops import hadamard
from hf_trak.kernels.backend import kernels_wanted
from hf_trak.kernels.philox import Stream, packed_words, philox_words, sign_tensor
from hf_trak.kernels.torch_hadamard import rotate_blocks

ALGORITHM = "hadamard-1"


class Rotation:
    """The rotation of rows of k features of one checkpoint: y = H·D·x / √p, thrice, in blocks of p = 2ⁱ ≤ k.

    An orthogonal map: inner products of rotated rows are those of the rows. After it, every entry is a sum of all
    entries of the row with random signs, so that any columns are a sketch of the whole row. Once would not do: of a
    row with a few large entries it makes entries of a few sizes, whose rounding errors all point the same way. After
    three times the errors are those of normal numbers, as of "structured spinners" (arXiv 1610.06209).
    """

    def __init__(self, k: int, seed: int, model_id: int) -> None:
        """
        Args:
            k: number of features, at least 1.
            seed: seed in [0, 2⁶³).
            model_id: id of the checkpoint in [0, 2³²).
        """
        self.k = k
        self.seed = seed
        self.model_id = model_id
        self._size = 1 << (k.bit_length() - 1)
        self._starts = 3 * ([0] if self._size == k else [0, k - self._size])
        self._signs: dict[torch.device, Tensor] = {}

    def apply(self, rows: Tensor) -> Tensor:
        """Rotate rows.

        Args:
            rows: `(rows, k)`, any floating dtype; finite.

        Returns:
            `(rows, k)`, float32, on the same device. The bits do not depend on the device.
        """
        result = rows.detach().to(torch.float32, copy=True, memory_format=torch.contiguous_format)
        self._rotate(result, self._signs_on(rows.device), self._starts)
        return result

    def inverse(self, rows: Tensor) -> Tensor:
        """Undo the rotation, up to rounding. Arguments and result as those of [`~Rotation.apply`]."""
        result = rows.detach().to(torch.float32, copy=True, memory_format=torch.contiguous_format)
        signs = self._signs_on(rows.device)
        for number, start in reversed(list(enumerate(self._starts))):
            self._rotate(result, torch.zeros_like(signs[:1]), [start])
            result[:, start : start + self._size] *= sign_tensor(signs[number])[: self._size]
        return result

    def _rotate(self, rows: Tensor, signs: Tensor, starts: list[int]) -> None:
        """Run rounds with these signs on the blocks that begin at `starts`, in place."""
        run = hadamard if kernels_wanted(rows.device) else rotate_blocks
        run(rows, signs, self._size, starts)

    def _signs_on(self, device: torch.device) -> Tensor:
        """Signs of all rounds, packed: `(rounds, ⌈p / 32⌉)`, int32."""
        if device not in self._signs:
            calls = -(-self._size // 128)
            rounds = torch.arange(len(self._starts))
            words = philox_words(0, calls, self.seed, self.model_id, Stream.HADAMARD_1, rounds)
            packed = packed_words(words).transpose(0, 1).flatten(1)[:, : -(-self._size // 32)]
            self._signs[device] = packed.contiguous().to(device)
        return self._signs[device]
