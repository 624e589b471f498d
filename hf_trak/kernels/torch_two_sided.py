"""Products of matrices with random signs from both sides, `Lᵀ G M`, in torch operators.

L `(I, p)` and M `(J, p)` hold independent ±1, see `factored-1` in `hf_trak/projectors/reference.py`. A matrix that is
a sum of T outer products is never formed: `Lᵀ (Σ_t a_t ⊗ b_t) M = Σ_t (Lᵀ a_t) ⊗ (Mᵀ b_t)`. Of the signs, one bit
each is kept; they are expanded a slice at a time, at a cost that the B · T rows of the product share.
"""

from collections import OrderedDict

import torch
from torch import Tensor

from hf_trak.kernels.philox import Stream, packed_words, philox_words, sign_tensor

_CACHE_BYTES = 2**27
_SIGNS_PER_PRODUCT = {"cpu": 2**18}  # expanded together: on a CPU they stay in the L2 cache
_SIGNS_ELSEWHERE = 2**24
_KEPT_SIGNS = 2**22  # of one matrix, while parts of a gradient follow each other
_BLOCK_BYTES = 2**25


class TwoSidedMap:
    """The signs of one seed and p, and products with them."""

    def __init__(self, size: int, seed: int) -> None:
        """
        Args:
            size: p.
            seed: seed of the random matrices.
        """
        self.size = size
        self.seed = seed
        self._words = -(-size // 32)
        self._cache: OrderedDict[tuple[Stream, int, int, int, torch.device], Tensor] = OrderedDict()
        self._workspace = torch.empty(0, dtype=torch.int32)
        self._right: tuple[tuple[int, int, torch.device], Tensor] | None = None

    def free_memory(self) -> None:
        """Drop the cached bits (p bits per row and column of a matrix, at most 128 MiB of them)."""
        self._cache.clear()
        self._workspace = torch.empty(0, dtype=torch.int32)
        self._right = None

    def signs(
        self, stream: Stream, position: int, first: int, n: int, total: int, model_id: int, device: torch.device
    ) -> Tensor:
        """Generate some rows of L or M.

        Args:
            stream: the stream of L or that of M.
            position: position of the matrix in the gradient vector.
            first: first row.
            n: number of rows.
            total: number of rows of the whole matrix, whose bits are kept.
            model_id: id of the checkpoint.
            device: where to compute.

        Returns:
            ±1, `(n, p)`, float32, valid until the next call.
        """
        bits = self._bits(stream, position, total, model_id, device)[first : first + n]
        needed = 32 * bits.numel()
        if self._workspace.device != device or self._workspace.numel() < needed:
            self._workspace = torch.empty(needed, dtype=torch.int32, device=device)
        return sign_tensor(bits, self._workspace)[:, : self.size]

    def _bits(self, stream: Stream, position: int, total: int, model_id: int, device: torch.device) -> Tensor:
        key = (stream, position, total, model_id, device)
        if key not in self._cache:
            blocks = torch.arange(-(-self.size // 128), device=device)
            words = packed_words(philox_words(position, total, self.seed, model_id, stream, blocks, device))
            self._cache[key] = words.flatten(1)[:, : self._words].contiguous()
            while len(self._cache) > 1 and sum(4 * kept.numel() for kept in self._cache.values()) > _CACHE_BYTES:
                self._cache.popitem(last=False)
        self._cache.move_to_end(key)
        return self._cache[key]

    def product(
        self, rows: Tensor, stream: Stream, position: int, first: int, total: int, model_id: int, transposed: bool
    ) -> Tensor:
        """Multiply by consecutive rows of L or M.

        Args:
            rows: `(…, n)`, or with `transposed` `(B, n, …)`, float32 or bfloat16.
            stream, position, first, total, model_id: see [`~TwoSidedMap.signs`].
            transposed: whether to multiply by the transposed signs from the left.

        Returns:
            `(…, p)`, or `(B, p, …)`, in the dtype of `rows`.
        """
        n = rows.shape[1] if transposed else rows.shape[-1]
        step = max(1, _SIGNS_PER_PRODUCT.get(rows.device.type, _SIGNS_ELSEWHERE) // (32 * self._words))
        result: Tensor | None = None
        for low in range(0, n, step):
            high = min(low + step, n)
            signs = self.signs(stream, position, first + low, high - low, total, model_id, rows.device).to(rows.dtype)
            part = signs.T @ rows[:, low:high] if transposed else rows[..., low:high] @ signs
            result = part if result is None else result.add_(part)
        assert result is not None
        return result

    def add_outer(
        self,
        sums: Tensor,
        left: Tensor,
        right: Tensor,
        position: int,
        shape: tuple[int, int],
        first: int,
        model_id: int,
    ) -> None:
        """Add rows of a matrix in factored form, `sums[b] += L[first : first + n]ᵀ (Σ_t left[b, t] ⊗ right[b, t]) M`.

        Args:
            sums: `(B, p, p)`, float32, changed in place.
            left: `(B, T, n)`.
            right: `(B, T, J)` of the same dtype.
            position: position of the matrix in the gradient vector.
            shape: (I, J).
            first: the first of the n rows.
            model_id: id of the checkpoint.
        """
        height, width = shape
        before = self.product(_working(left), Stream.FACTORED_1_LEFT, position, first, height, model_id, False)
        after = self.product(_working(right), Stream.FACTORED_1_RIGHT, position, 0, width, model_id, False)
        sums.baddbmm_(before.float().transpose(1, 2), after.float())

    def add_rows(
        self, sums: Tensor, rows: Tensor, position: int, shape: tuple[int, int], first: int, model_id: int
    ) -> None:
        """Add formed rows of a matrix, `sums[b] += L[first : first + n]ᵀ rows[b] M`.

        Args:
            sums: `(B, p, p)`, float32, changed in place.
            rows: `(B, n, J)`.
            position, shape, first, model_id: see [`~TwoSidedMap.add_outer`].
        """
        height, width = shape
        step = max(1, _BLOCK_BYTES // (4 * len(rows) * width))
        for low in range(0, rows.shape[1], step):
            part = rows[:, low : low + step].float()
            after = self._of_used_rows(part, position, width, model_id)
            sums += self.product(after, Stream.FACTORED_1_LEFT, position, first + low, height, model_id, True)

    def _of_used_rows(self, part: Tensor, position: int, width: int, model_id: int) -> Tensor:
        """Multiply rows `(B, n, J)` by M. Of an embedding, most rows of most samples are zero and are left out."""

        key = (position, model_id, part.device)
        if width * self.size <= _KEPT_SIGNS and (self._right is None or self._right[0] != key):
            signs = self.signs(Stream.FACTORED_1_RIGHT, position, 0, width, width, model_id, part.device)
            self._right = key, signs.clone()

        def product(rows: Tensor) -> Tensor:
            if self._right is not None and self._right[0] == key:
                return rows @ self._right[1]
            return self.product(rows, Stream.FACTORED_1_RIGHT, position, 0, width, model_id, False)

        if part.device.type == "cpu":  # a look at the values would stall a GPU
            used = (part != 0).any(2)
            if 2 * int(used.sum()) < used.numel():
                result = part.new_zeros(*part.shape[:2], self.size)
                if bool(used.any()):
                    result[used] = product(part[used])
                return result
        return product(part)


def _working(factor: Tensor) -> Tensor:
    """Return a factor in the dtype of its product: float16 would overflow, and CPUs have no fast bfloat16."""
    return factor if factor.dtype == torch.bfloat16 and factor.is_cuda else factor.float()
