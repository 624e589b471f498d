"""Tolerance of the self-check: a right gradient differs from that of plain autograd by rounding alone.

Half precision rounds every intermediate result to two or three digits, and the part of that which reaches a gradient
depends on the model: in bfloat16 0.5 % for a Llama, 8 % for a T5. So it is measured, by computing the gradients of
the same samples once more with other rounding: in a batch of another size, with f scaled by a factor that is no power
of two, and with the last bit of the outputs of layers drawn at random (Monte Carlo arithmetic, Parker, Pierce & Eggert
2000, doi:10.1109/5992.852391).
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from hf_trak.gradient_computers.environment import gradients_set_aside, removing
from hf_trak.gradient_computers.layout import ParameterLayout, ParameterSlot
from hf_trak.kernels.torch_sparse import SparseMap
from hf_trak.modelout_functions.deferred_logits import DeferredLogits

SCALE = 1.37

"""Factor on f which makes every rounding of the backward pass fall differently."""


_NOISE_FACTOR = 8.0

"""Over 63 tiny architectures the engines are off by up to 3.7 times what other rounding changes (T5, whose attention
is computed by another kernel where its bias needs a gradient)."""


_TERM_EPS = 32 * torch.finfo(torch.float32).eps

"""Rounding of a log-probability of some dozens of tokens, relative to itself."""


_HALF_EPS = 1e-6

"""Dtypes whose spacing at 1 is larger than this are half precision or less."""


@dataclass(frozen=True)
class Tolerance:
    """An error e of a parameter's gradient g passes if ‖e‖ ≤ relative · (‖g‖ + share · ‖all gradients of the sample‖).

    The second term is for parameters whose gradient vanishes by symmetry (the key bias of an attention layer), so that
    it consists of rounding only. In half precision an error also passes if it is at most eight times the change that
    other rounding made, up to `ceiling · (‖g‖ + 0.1 · ‖all gradients of the sample‖)`.

    Attributes:
        relative: relative error that is always allowed.
        share: smallest share of the sample's whole gradient that a parameter's gradient counts for.
        ceiling: relative error above which nothing passes, whatever other rounding changed; `None` in float32.
        noise: `(rows, parameters)`, norms of the changes that other rounding made; `None` if not measured.
        output_noise: `(rows,)`, the changes that it made in f; `None` if not measured.
        terms: `(rows,)`, sizes of the numbers whose difference f is; `None` for any other f.
    """

    relative: float
    share: float = 1e-2
    ceiling: float | None = None
    noise: Tensor | None = None
    output_noise: Tensor | None = None
    terms: Tensor | None = None

    @classmethod
    def of(cls, model: torch.nn.Module, output: Tensor, dtypes: Iterable[torch.dtype] = ()) -> "Tolerance":
        """Choose the tolerance before any measurement, from the lowest precision in use.

        Args:
            model: the model, for the dtypes of its parameters.
            output: f, on the device where the model computes.
            dtypes: dtypes seen during the forward pass, see [`PrecisionObserver`].

        Returns:
            `Tolerance`: 4 ε in half precision, 2 % where a GPU multiplies in TF32, and 0.1 % in float32.
        """
        floats = [p.dtype for p in model.parameters() if p.is_floating_point()] + [output.dtype, *dtypes]
        eps = max(torch.finfo(dtype).eps for dtype in floats)
        if eps > _HALF_EPS:
            ceiling = min(40 * eps, 0.3)
            return cls(min(4 * eps, ceiling), ceiling=ceiling)
        if output.device.type == "cuda" and (torch.backends.cudnn.allow_tf32 or torch.backends.cuda.matmul.allow_tf32):
            return cls(2e-2)
        return cls(1e-3)

    @property
    def to_be_measured(self) -> bool:
        """Tell whether rounding has to be measured before this tolerance can be used."""
        return self.ceiling is not None and self.noise is None

    @property
    def coarsest(self) -> "Tolerance":
        """Return the tolerance that there would be if other rounding changed everything."""
        return self if self.ceiling is None else Tolerance(self.ceiling, 0.1)

    def limits(self, norms: Tensor, totals: Tensor) -> Tensor:
        """Compute the largest norms of errors that pass.

        Args:
            norms: `(rows, parameters)`, norms of the gradients of each parameter.
            totals: `(rows,)`, norms of the whole gradients.

        Returns:
            `torch.Tensor`: `(rows, parameters)`.
        """
        allowed = self.relative * (norms + self.share * totals[:, None])
        if self.noise is None or self.ceiling is None:
            return allowed
        return allowed.maximum((_NOISE_FACTOR * self.noise).minimum(self.ceiling * (norms + 0.1 * totals[:, None])))

    def output_limits(self, output: Tensor) -> Tensor:
        """Compute the largest errors of f that pass, `(rows,)`, relative to each f and to the mean of all.

        In half precision they are a quarter of those of gradients, which are rounded on the way back as well. An f
        that is a difference, such as that of log-probabilities before a training by preferences, has the rounding of
        its terms.

        Args:
            output: f, `(rows,)`.
        """
        size = output.abs() + output.abs().mean()
        if self.output_noise is None or self.ceiling is None:
            rounding = 0.0 if self.terms is None else _TERM_EPS * self.terms.to(size)
            return self.relative * size + rounding
        measured = (_NOISE_FACTOR * self.output_noise).minimum(self.ceiling * size)
        return (0.25 * self.relative * size).maximum(measured)


def norms_of(layout: ParameterLayout, gradients: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the norms of gradients `(rows, P)`: by parameter, `(rows, parameters)`, and as a whole, `(rows,)`."""
    # the squares of gradients that float32 holds may be too large for it; no Apple GPU knows float64
    dtype = torch.float32 if gradients.device.type == "mps" else torch.float64
    pieces = (gradients[:, slot.offset : slot.offset + slot.numel] for slot in layout.slots)
    norms = torch.stack([torch.linalg.vector_norm(piece, dim=1, dtype=dtype) for piece in pieces], dim=1)
    return norms, torch.linalg.vector_norm(norms, dim=1)


class PrecisionObserver(TorchFunctionMode):
    """Notes the half-precision dtypes that torch functions return.

    Autocast can only be seen inside of `forward`: `accelerate` switches it on there, and has the outputs converted to
    float32.

    Attributes:
        dtypes: the dtypes seen.
    """

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: set[torch.dtype] = set()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and _is_half(result):
            self.dtypes.add(result.dtype)
        return result


@contextmanager
def rounded_at_random(model: torch.nn.Module) -> Iterator[None]:
    """Change the half-precision outputs of layers by up to half a unit in the last place, the same way every time."""
    generators: dict[torch.device, torch.Generator] = {}

    def hook(module: torch.nn.Module, args: Any, result: Any) -> Any:
        if not isinstance(result, Tensor) or isinstance(result, DeferredLogits) or not _is_half(result):
            return None
        if result.device not in generators:
            generators[result.device] = torch.Generator(result.device).manual_seed(0)
        return _RandomlyRounded.apply(result, generators[result.device])

    handles = [m.register_forward_hook(hook) for m in model.modules() if next(m.children(), None) is None]
    with removing(handles):
        yield


class _RandomlyRounded(torch.autograd.Function):
    """Rounds at random; the gradient passes unchanged, so that nothing has to be kept for it."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, generator: torch.Generator) -> Tensor:
        draw = torch.rand(values.shape, generator=generator, device=values.device) - 0.5
        return (values.float() * (1 + torch.finfo(values.dtype).eps * draw)).to(values.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0], None


def _is_half(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and torch.finfo(tensor.dtype).eps > _HALF_EPS


SKETCHED_FROM = 2**28

"""Number of attributed parameters from which on gradients are sketched: a gradient takes 1 GiB in float32."""


WIDTH = 256

"""Sums for each parameter."""


class GradientSketch:
    """The map from gradients `(rows, P)` to sums `(rows, parameters · WIDTH)`.

    Attributes:
        layout (`ParameterLayout`): the place of every parameter among the sums.
    """

    def __init__(self, layout: ParameterLayout) -> None:
        """
        Args:
            layout: the attributed parameters.
        """
        self._layout = layout
        self._map = SparseMap(layout.total, WIDTH, 0, 1)
        self._places = {name: WIDTH * index for index, name in enumerate(layout.names)}
        self.layout = ParameterLayout(
            tuple(ParameterSlot(name, (WIDTH,), place) for name, place in self._places.items())
        )

    def empty(self, rows: int) -> Tensor:
        """Make sums of zeros, `(rows, parameters · WIDTH)`, float32."""
        return torch.zeros(rows, self.layout.total)

    def add(self, sums: Tensor, start: int, block: Tensor) -> None:
        """Add columns of gradients to their sums.

        Args:
            sums: `(rows, parameters · WIDTH)`, changed in place.
            start: position of the first column in the gradient vector.
            block: `(rows, n)`; its columns may belong to several parameters.
        """
        for slot, first, last in self._layout.overlaps(start, start + block.shape[1]):
            found = torch.zeros(block.shape[0], WIDTH, device=block.device)
            self._map.accumulate(found, block[:, first - start : last - start].detach(), first, 0)
            place = self._places[slot.name]
            sums[:, place : place + WIDTH] += found.to(sums.device)


def each_gradient(f: Tensor, parameters: Mapping[str, Tensor], receive: Callable[[str, Tensor], None]) -> None:
    """Take the gradients of a scalar by plain autograd, and hand each on as soon as it is there.

    Args:
        f: the scalar.
        parameters: leaves that require a gradient, by name. What they hold in `.grad` is left as it is.
        receive: called with name and gradient. Parameters that `f` does not depend on are left out.
    """
    handles: list[RemovableHandle] = []

    def receiving(name: str) -> Callable[[Tensor], None]:
        def hook(parameter: Tensor) -> None:
            gradient, parameter.grad = parameter.grad, None
            assert gradient is not None
            receive(name, gradient.detach())

        return hook

    with gradients_set_aside(parameters.values()), removing(handles):
        for name, parameter in parameters.items():
            handles.append(parameter.register_post_accumulate_grad_hook(receiving(name)))
        f.backward()
