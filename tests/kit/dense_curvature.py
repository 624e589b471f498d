"""The curvature of a small network as one explicit matrix, in float64, from autograd and textbook formulas alone.

Nothing here is shared with the library: gradients of single samples come from `torch.func`, patches of convolutions
from `unfold`, and Kronecker products are formed.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

Objective = Callable[[Tensor, Tensor], Tensor]
"""Maps the model's output and the labels of a batch to one number per sample."""


def minus_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Log-likelihood, `(B,)`."""
    return -nn.functional.cross_entropy(logits, labels, reduction="none")


def log_odds(logits: Tensor, labels: Tensor) -> Tensor:
    """Log p / (1 − p) of the label, `(B,)`."""
    chosen = logits.gather(1, labels[:, None])
    return (chosen - logits.scatter(1, labels[:, None], -torch.inf).logsumexp(1, keepdim=True)).squeeze(1)


def sample_gradients(model: nn.Module, inputs: Tensor, labels: Tensor, objective: Objective) -> Tensor:
    """Gradients of all parameters, in their order, `(B, P)`, float64."""
    model = copy.deepcopy(model).double()
    parameters = dict(model.named_parameters())

    def one(parameters: dict[str, Tensor], sample: Tensor, label: Tensor) -> Tensor:
        return objective(functional_call(model, parameters, sample[None]), label[None])[0]

    found = vmap(grad(one), (None, 0, 0))(parameters, inputs.double(), labels)
    return torch.cat([found[name].flatten(1) for name in parameters], 1).detach()


@dataclass
class Factors:
    """What a linear map sees, float64.

    Attributes:
        places: positions of its parameters in the whole gradient, `(O, I)`, the bias in the last column.
        outputs: gradients of its outputs, `(B, T, O)`.
        inputs: its inputs, with 1 for the bias, `(B, T, I)`.
    """

    places: Tensor
    outputs: Tensor
    inputs: Tensor

    def covariances(self) -> tuple[Tensor, Tensor]:
        """S `(O, O)` and A `(I, I)`, means over the positions that add something to the gradient of the map.

        The others have an output that nothing depends on, or no input. Textbooks, in which there are none, and other
        libraries count them.
        """
        s, a = (side.flatten(0, 1)[self._taking_part()] for side in (self.outputs, self.inputs))
        return s.T @ s / len(s), a.T @ a / len(a)

    def counted(self) -> int:
        """Number of positions behind the covariances."""
        return int(self._taking_part().sum())

    def _taking_part(self) -> Tensor:
        return ((self.outputs != 0).any(2) & (self.inputs != 0).any(2)).flatten()


def layer_factors(model: nn.Module, inputs: Tensor, labels: Tensor, objective: Objective) -> list[Factors]:
    """Factors of all linear layers and of every group of channels of all convolutions, in the model's order."""
    model = copy.deepcopy(model).double()
    seen: dict[str, tuple[Tensor, Tensor]] = {}

    def hook(name: str) -> Callable[..., None]:
        def note(_: nn.Module, given: tuple[Tensor, ...], output: Tensor) -> None:
            seen[name] = (given[0].detach(), output)

        return note

    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, nn.Linear | nn.Conv2d)}
    for name, layer in layers.items():
        layer.register_forward_hook(hook(name))
    total = objective(model(inputs.double()), labels).sum()
    gradients = torch.autograd.grad(total, [seen[name][1] for name in layers])

    places = places_of(model)
    found = []
    for (name, layer), outputs in zip(layers.items(), gradients, strict=True):
        height = layer.weight.shape[0]
        where = places[f"{name}.weight"].view(height, -1)
        if layer.bias is not None:
            where = torch.cat([where, places[f"{name}.bias"][:, None]], 1)
        groups = layer.groups if isinstance(layer, nn.Conv2d) else 1
        for group in range(groups):
            part = slice(group * height // groups, (group + 1) * height // groups)
            given = _positions(layer, seen[name][0], group)
            if layer.bias is not None:
                given = torch.cat([given, torch.ones_like(given[..., :1])], 2)
            out = outputs.flatten(2).transpose(1, 2) if isinstance(layer, nn.Conv2d) else outputs[:, None]
            found.append(Factors(where[part], out[..., part], given))
    return found


def places_of(model: nn.Module) -> dict[str, Tensor]:
    """Positions of every parameter in the whole gradient, `(numel,)`."""
    places, start = {}, 0
    for name, parameter in model.named_parameters():
        places[name] = torch.arange(start, start + parameter.numel())
        start += parameter.numel()
    return places


def _positions(layer: nn.Module, given: Tensor, group: int) -> Tensor:
    """The inputs of a layer at all positions, `(B, T, I)`."""
    if isinstance(layer, nn.Linear):
        return given[:, None]
    assert isinstance(layer, nn.Conv2d)
    channels = given.chunk(layer.groups, 1)[group]
    patches = nn.functional.unfold(channels, layer.kernel_size, layer.dilation, layer.padding, layer.stride)
    return patches.transpose(1, 2)


@dataclass
class Block:
    """One block of a curvature.

    Attributes:
        places: positions of its parameters in the whole gradient.
        matrix: the curvature of these parameters.
        eigenvalues: of the matrix, in the shape of the parameters.
    """

    places: Tensor
    matrix: Tensor
    eigenvalues: Tensor


def kronecker_block(factors: Factors, gradients: Tensor, kind: str) -> Block:
    """The curvature of a linear map: K diag(Λ) Kᵀ with K = Q_S ⊗ Q_A explicitly.

    Args:
        factors: of the map.
        gradients: whole gradients of the rows, `(B, P)`.
        kind: `"ekfac"`, `"shampoo"` or `"kfac"`.
    """
    rows = gradients[:, factors.places]
    left, right = factors.covariances()
    if kind == "shampoo":
        left, right = (rows @ rows.mT).mean(0), (rows.mT @ rows).mean(0)
    (left_values, left_basis), (right_values, right_basis) = torch.linalg.eigh(left), torch.linalg.eigh(right)
    basis = torch.kron(left_basis, right_basis)
    if kind == "kfac":
        positions = factors.counted() / len(rows)
        values = positions * torch.outer(left_values, right_values).clamp(min=0).flatten()
    else:
        values = (rows.flatten(1) @ basis).square().mean(0)
    return Block(factors.places.flatten(), basis * values @ basis.T, values.view(factors.places.shape))


def diagonal_block(places: Tensor, gradients: Tensor) -> Block:
    """Mean squared gradients."""
    values = gradients[:, places].square().mean(0)
    return Block(places, values.diag(), values)


def block_scores(blocks: list[Block], train: Tensor, targets: Tensor, damping: float) -> Tensor:
    """Σ_blocks G (F + c · mean(λ) I)⁻¹ G_qᵀ of whole gradients `(n, P)` and `(m, P)`: `(n, m)`."""
    scores = torch.zeros(len(train), len(targets), dtype=torch.float64)
    for block in blocks:
        damped = block.matrix + damping * block.eigenvalues.mean() * torch.eye(len(block.matrix)).double()
        scores += train[:, block.places] @ torch.linalg.solve(damped, targets[:, block.places].T)
    return scores
