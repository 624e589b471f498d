"""The largest eigenvalues of G = XᵀX by randomized subspace iteration, in passes over the rows.

Halko, Martinsson, Tropp, Finding structure with randomness, SIAM Review 53, 2011, algorithm 4.4; the factors are those
of Nyström's approximation, which are better than a projection at the same cost (their section 5.5; Tropp, Yurtsever,
Udell, Cevher, NeurIPS 2017):

    pass 1   magnitudes of the features, trace(G)
    pass 2   Y = GΩ with random signs Ω (k, ℓ), ℓ slightly above the rank r; Q = an orthonormal basis of the range of
             Y. Where ℓ = k, Q = I instead
    pass 3   Y = GQ and Gω with s = 16 random normal vectors ω; Ĝ = the r largest eigenvalues of Y(QᵀY)⁻¹Yᵀ
    pass 4   Eω = Gω − Ĝω is known, then E²ω
    pass 5   E³ω

Ĝ ≼ G: with H = G^{1/2} and the projection P on the range of HQ, G − Y(QᵀY)⁻¹Yᵀ = H(I − P)H, and leaving out
eigenvalues leaves a positive semidefinite matrix, too.

*What is left out.* Let v be a unit eigenvector of E = G − Ĝ for the eigenvalue of size ‖E‖₂. Then ‖Eᑫω‖ ≥ ‖E‖₂ᑫ |vᵀω|,
and vᵀω is a standard normal number. All s of them are below c in size with probability p = (2Φ(c) − 1)ˢ, Φ the normal
distribution. So with probability 1 − p

    ‖E‖₂ ≤ ε = (max_j ‖Eᑫω_j‖ / c)^{1/q}

Here s = 16, q = 3 and p = 10⁻⁶, which gives c = 0.56. For a matrix E with D equal eigenvalues ‖Eᑫω‖ is about
‖E‖₂ᑫ √D, and ε too large by (√D / c)^{1/q}, 7.7 for D = 65,536; where eigenvalues fall off, ε is closer.

After each pass the main process saves what the next one needs, so that a run that was killed goes on with the same
bits. Sums over rows are sums of integers, see `hf_trak.scores.gram`: the same bits for any number of processes.
"""

import logging
import math
from collections.abc import Callable
from statistics import NormalDist

import torch
from torch import Tensor

from hf_trak.errors import StoreError
from hf_trak.kernels.philox import MASK32, Stream, Word, packed_words, philox_4x32, sign_tensor
from hf_trak.scores.low_rank import Factors, overlaps_of
from hf_trak.scores.training_features import Sizes, TrainingFeatures, sum_over_strips
from hf_trak.store.shards import Identity, TensorSpec
from hf_trak.store.solver_files import SolverFiles

_SIGNS_PER_CALL = 128

_NORMALS_PER_CALL = 4

_ROWS_TOGETHER = 1 << 14


def random_signs(rows: int, columns: int, seed: int, model_id: int) -> Tensor:
    """Generate independent signs ±1, with the same bits everywhere: `(rows, columns)` float32.

    Args:
        rows: number of rows.
        columns: number of columns. One call of the generator gives 128 of them.
        seed: the seed, in [0, 2⁶³).
        model_id: id of the checkpoint, in [0, 2³²).
    """
    result = torch.empty(rows, columns)
    for first in range(0, rows, _ROWS_TOGETHER):
        part = result[first : first + _ROWS_TOGETHER]
        for block in range(-(-columns // _SIGNS_PER_CALL)):
            left = block * _SIGNS_PER_CALL
            signs = sign_tensor(packed_words(_words(first, len(part), block, seed, model_id, Stream.SOLVER_SIGNS_1)))
            part[:, left : left + _SIGNS_PER_CALL] = signs[:, : columns - left]
    return result


def random_normals(rows: int, columns: int, seed: int, model_id: int) -> Tensor:
    """Generate independent standard normal numbers, `(rows, columns)`, float64, by the method of Box and Muller.

    The arguments are those of [`random_signs`]. Bits depend on the logarithm and the cosine of the machine.
    """
    parts = []
    for block in range(-(-columns // _NORMALS_PER_CALL)):
        words = [word.double() for word in _words(0, rows, block, seed, model_id, Stream.SOLVER_NORMALS_1)]
        for first, second in ((words[0], words[1]), (words[2], words[3])):
            radius = (-2 * ((first + 1) / 2.0**32).log()).sqrt()
            angle = second * (2 * math.pi / 2.0**32)
            parts += [radius * angle.cos(), radius * angle.sin()]
    return torch.stack(parts[:columns], dim=1)


def _words(
    start: int, count: int, block: int, seed: int, model_id: int, stream: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    counter: tuple[Word, Word, Word, Word] = (
        torch.arange(start, start + count, dtype=torch.int64), 0, block | (stream << 24), model_id,
    )  # fmt: skip
    return philox_4x32(counter, (seed & MASK32, seed >> 32))


logger = logging.getLogger(__name__)


ALGORITHM = "subspace-1"

"""Raised whenever the factors of the same features change."""


PROBES = 16

"""Random vectors that measure the error."""

_POWERS = 3

_FAILURE = 1e-6

_STRIP_NUMBERS = 1 << 24

PASSES = 5

"""Passes over the rows."""


def width_of(rank: int, n: int, k: int) -> int:
    """Return the number ℓ of columns of the basis: the rank and an eighth more, as far as there are eigenvalues."""
    return min(rank + rank // 8 + 8, n, k)


class SubspaceIteration:
    """The passes that compute the factors of one checkpoint. All processes call its methods together."""

    def __init__(self, features: TrainingFeatures, files: SolverFiles, rank: int, seed: int, model_id: int) -> None:
        """
        Args:
            features: X.
            files: where the factors are kept, and what the passes leave for each other.
            rank: r, at most min(n, k).
            seed: seed of the random vectors.
            model_id: id of the checkpoint, for the random vectors.
        """
        self._features = features
        self._files = files
        self._rank = rank
        self._seed = seed
        self._model_id = model_id
        self._width = width_of(rank, features.n, features.k)
        self._name = f"low_rank-{rank}"
        self._state = f"{self._name}.passes"

    def run(self) -> None:
        """Compute and save the factors, unless that is done, going on where a killed run stopped.

        Raises:
            StoreError: a shard or a saved file is damaged, or a file cannot be written.
            NonFiniteError: a feature is not finite; names its row.
        """
        processes = self._features.processes
        while not processes.broadcast_from_main(lambda: self._files.exists(self._name)):
            done = processes.broadcast_from_main(self._passes_done)
            processes.broadcast_from_main(self._pass(done))
            if processes.is_main_process:
                logger.info("Checkpoint %d, low-rank solver: pass %d of %d.", self._model_id, done + 1, PASSES)
        processes.broadcast_from_main(lambda: self._files.remove(self._state))

    def factors(self) -> Factors:
        """Read the saved factors; they are memory-mapped.

        Raises:
            StoreError: the file is missing or damaged.
        """
        r = self._rank
        specs = {**self._factor_specs, "overlaps": TensorSpec((r, r), (torch.float64,))}
        tensors, facts = self._files.read(self._name, specs, self._identity("low_rank"), ("trace", "residual"))
        return Factors(tensors["vectors"], tensors["eigenvalues"], tensors["overlaps"], **facts)

    # -- the passes: each returns what the main process has to do when it is over ------------------------------------

    def _pass(self, done: int) -> Callable[[], None]:
        steps = (self._measure, self._find_basis, self._factorize)
        return steps[done]() if done < len(steps) else self._power(done)

    def _measure(self) -> Callable[[], None]:
        sizes = self._features.sizes()
        return lambda: self._save(1, sizes, {})

    def _find_basis(self) -> Callable[[], None]:
        k, width, sizes = self._features.k, self._width, self._sizes()
        product: Tensor | None = None
        if width < k:
            product = self._features.gram_times(random_signs(k, width, self._seed, self._model_id), sizes)

        def finish() -> None:
            basis = torch.eye(k) if product is None else orthonormal(product)
            probes = random_normals(k, PROBES, self._seed, self._model_id)
            self._save(2, sizes, {"basis": torch.cat([basis, probes.float()], dim=1)})

        return finish

    def _factorize(self) -> Callable[[], None]:
        sizes, (basis,) = self._sizes(), self._saved(2, "basis")
        product = self._features.gram_times(basis, sizes)

        def finish() -> None:
            images = product[:, self._width :].clone()
            found = nystroem(product[:, : self._width], basis[:, : self._width], self._rank)
            probes = self._residual(images, basis[:, self._width :].double(), found, sizes)
            self._save(3, sizes, {"vectors": found[0], "eigenvalues": found[1], "probes": probes})

        return finish

    def _power(self, done: int) -> Callable[[], None]:
        sizes = self._sizes()
        vectors, eigenvalues, probes = self._saved(done, "vectors", "eigenvalues", "probes")
        product = self._features.gram_times(probes, sizes)

        def finish() -> None:
            powers = self._residual(product, probes, (vectors, eigenvalues), sizes)
            if done + 1 < PASSES:
                self._save(done + 1, sizes, {"vectors": vectors, "eigenvalues": eigenvalues, "probes": powers})
                return
            tensors = {"vectors": vectors, "eigenvalues": eigenvalues, "overlaps": overlaps_of(vectors)}
            facts = {"trace": sizes.trace, "residual": sizes.trace * residual_bound(powers)}
            self._files.write(self._name, tensors, self._identity("low_rank"), facts)

        return finish

    @staticmethod
    def _residual(images: Tensor, probes: Tensor, found: tuple[Tensor, Tensor], sizes: Sizes) -> Tensor:
        """Compute Eω / trace(G), which cannot overflow, from Gω, ω and Ĝ."""
        vectors, eigenvalues = found
        factors = Factors(vectors, eigenvalues, torch.empty(0), sizes.trace, 0.0)
        kept = factors.combine(factors.project(probes.T) * eigenvalues).T
        return (images - kept) / (sizes.trace if sizes.trace > 0 else 1.0)

    # -- what the passes leave for each other ----------------------------------------------------------------------

    def _identity(self, kind: str) -> Identity:
        return {"algorithm": ALGORITHM, "kind": kind, "rank": self._rank, "seed": self._seed}

    @property
    def _factor_specs(self) -> dict[str, TensorSpec]:
        k, r = self._features.k, self._rank
        return {"eigenvalues": TensorSpec((r,), (torch.float64,)), "vectors": TensorSpec((k, r), (torch.float32,))}

    def _state_specs(self, passes: int) -> dict[str, TensorSpec]:
        k, specs = self._features.k, {"column_squares": TensorSpec((self._features.k,), (torch.float64,))}
        if passes == 2:
            specs["basis"] = TensorSpec((k, self._width + PROBES), (torch.float32,))
        if passes > 2:
            specs |= {**self._factor_specs, "probes": TensorSpec((k, PROBES), (torch.float64,))}
        return specs

    def _passes_done(self) -> int:
        """Return the number of passes that need not be repeated."""
        if not self._files.exists(self._state):
            return 0
        passes = int(self._files.facts(self._state, {}, self._identity("passes"), ("passes",))["passes"])
        if not 0 < passes < PASSES:
            raise StoreError(
                f"{self._files.path(self._state)} says that {passes} passes are done. Expected 1 to {PASSES - 1}. "
                "Delete this file and run the same command again."
            )
        return passes

    def _sizes(self) -> Sizes:
        specs = self._state_specs(1)
        tensors, facts = self._files.read(self._state, specs, self._identity("passes"), ("trace",))
        return Sizes(tensors["column_squares"], facts["trace"])

    def _saved(self, passes: int, *names: str) -> list[Tensor]:
        specs = self._state_specs(passes)
        tensors, _ = self._files.read(self._state, specs, self._identity("passes"))
        return [tensors[name] for name in names]

    def _save(self, passes: int, sizes: Sizes, tensors: dict[str, Tensor]) -> None:
        facts = {"passes": passes, "trace": sizes.trace}
        content = {"column_squares": sizes.column_squares, **tensors}
        self._files.write(self._state, content, self._identity("passes"), facts)


def orthonormal(product: Tensor) -> Tensor:
    """Compute a float32 basis of the range of Y `(k, ℓ)`, orthonormal but for directions that rounding hides.

    Y U D^{-1/2} with the eigenvalues D and eigenvectors U of YᵀY. Eigenvalues below rounding are raised to it.
    """
    strip = max(1, _STRIP_NUMBERS // product.shape[1])
    values, vectors = torch.linalg.eigh(sum_over_strips(product, strip, lambda part: part.T @ part))
    least = float(values[-1]) * len(values) * torch.finfo(torch.float64).eps
    scale = vectors / (values.clamp_min(least) if least > 0 else torch.ones_like(values)).sqrt()
    return torch.cat([(part @ scale).float() for part in product.split(strip)])


def nystroem(product: Tensor, basis: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Compute the largest eigenvalues of Y(QᵀY)⁻¹Yᵀ with Y = GQ.

    Args:
        product: Y, `(k, ℓ)`, float64. It is overwritten.
        basis: Q, `(k, ℓ)`, float32.
        rank: r ≤ ℓ.

    Returns:
        Vectors `(k, r)`, float32, of length 1 or zero, and eigenvalues `(r,)`, float64, descending.
    """
    strip = max(1, _STRIP_NUMBERS // product.shape[1])
    inner = torch.zeros(product.shape[1], product.shape[1], dtype=torch.float64)
    for left, right in zip(basis.split(strip), product.split(strip), strict=True):
        inner.addmm_(left.double().T, right)
    values, rotation = torch.linalg.eigh((inner + inner.T) / 2)
    # directions in which rounding outweighs QᵀGQ
    kept = values > float(values[-1]) * 1e-12
    root = rotation[:, kept] / values[kept].sqrt()
    count = root.shape[1]
    vectors, eigenvalues = torch.zeros(len(product), rank), torch.zeros(rank, dtype=torch.float64)
    if count == 0:
        return vectors, eigenvalues
    for part in product.split(strip):
        part[:, :count] = part @ root
    product = product[:, :count]
    _, rotation = torch.linalg.eigh(sum_over_strips(product, strip, lambda part: part.T @ part))
    rotation = rotation.flip(1)[:, :rank]
    squares = sum_over_strips(product, strip, lambda part: (part @ rotation).square().sum(dim=0))
    lengths = torch.where(squares > 0, squares.sqrt(), 1.0)
    eigenvalues[: len(squares)] = squares
    for part, rows in zip(product.split(strip), vectors.split(strip), strict=True):
        rows[:, : len(squares)] = (part @ rotation) / lengths
    return vectors, eigenvalues


def residual_bound(powers: Tensor) -> float:
    """Bound ‖E‖₂ from Eᑫω_j, the columns of `powers` `(k, s)`, see the module's docstring."""
    smallest = NormalDist().inv_cdf((1 + _FAILURE ** (1 / PROBES)) / 2)
    return float(powers.norm(dim=0).max() / smallest) ** (1 / _POWERS)
