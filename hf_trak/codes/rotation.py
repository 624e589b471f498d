"""The random rotation `hadamard-1` of rows of features, defined in `reference.py`."""

import torch
from torch import Tensor

from hf_trak.kernels.philox import Stream, packed_words, philox_words, sign_tensor
from hf_trak.kernels.torch_hadamard import hadamard_rows

ALGORITHM = "hadamard-1"

_ROWS_BYTES = 1 << 22
"""Rows that are rotated together on a CPU take so many bytes, which stay in its caches."""


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
        self._signs: dict[tuple[int, torch.device], Tensor] = {}

    def apply(self, rows: Tensor) -> Tensor:
        """Rotate rows.

        Args:
            rows: `(rows, k)`, any floating dtype; finite.

        Returns:
            `(rows, k)`, float32, on the same device. The bits do not depend on the device.
        """
        result = rows.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
        together = max(1, _ROWS_BYTES // (4 * self.k)) if rows.device.type == "cpu" else max(1, rows.shape[0])
        for part in result.split(together):
            for number, start in enumerate(self._starts):
                block = part[:, start : start + self._size]
                block.copy_(hadamard_rows(block * self._scaled_signs(number, rows.device)))
        return result

    def inverse(self, rows: Tensor) -> Tensor:
        """Undo the rotation, up to rounding. Arguments and result as those of [`~Rotation.apply`]."""
        result = rows.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
        for number, start in reversed(list(enumerate(self._starts))):
            block = result[:, start : start + self._size]
            block.copy_(hadamard_rows(block.contiguous()) * self._scaled_signs(number, rows.device))
        return result

    def _scaled_signs(self, number: int, device: torch.device) -> Tensor:
        """Signs of a round, divided by √p: `(p,)`, float32."""
        key = (number, device)
        if key not in self._signs:
            calls = -(-self._size // 128)
            words = philox_words(0, calls, self.seed, self.model_id, Stream.HADAMARD_1, number)
            signs = sign_tensor(packed_words(words).flatten())[: self._size]
            self._signs[key] = (signs * torch.tensor(self._size**-0.5, dtype=torch.float32)).to(device)
        return self._signs[key]
