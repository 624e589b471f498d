"""The division of the parameters of a model over processes, as DTensors of FSDP2 and of tensor parallelism tell.

Processes that hold different slices of the same matrix multiplications (tensor parallelism) work on the same rows and
form a row group. Each group works on rows of its own. Under FSDP2 alone, every process is a group by itself.
"""

import math
from dataclasses import dataclass
from itertools import pairwise, product
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hf_trak._compat import class_if_imported, fsdp_mesh
from hf_trak.runtime.processes import Processes, share_of
from hf_trak.runtime.zero import is_zero, partition


def is_sharded_tensor(tensor: Any) -> bool:
    """Tell whether a tensor is a DTensor. This process may hold only a part of it."""
    kind = class_if_imported("torch.distributed.tensor", "DTensor")  # the import takes a second
    return kind is not None and isinstance(tensor, kind)


def is_sharded(model: nn.Module) -> bool:
    """Tell whether FSDP2, tensor parallelism or ZeRO-3 divides parameters of a model over processes."""
    divided = any(is_sharded_tensor(parameter) for parameter in model.parameters())
    return divided or bool(fsdp_modules(model)) or is_zero(model)


def fsdp_modules(model: nn.Module) -> list[Any]:
    """List the modules to which `fully_shard` was applied, outer ones first."""
    kind = class_if_imported("torch.distributed.fsdp", "FSDPModule")
    return [] if kind is None else [module for module in model.modules() if isinstance(module, kind)]


def reshard(model: nn.Module) -> None:
    """Free the gathered parameters of FSDP2 and ZeRO-3, so that every process sees the same shards again."""
    for module in fsdp_modules(model):
        module.reshard()
    partition(model)


def averaged_over(model: nn.Module) -> dict[str, int]:
    """Return, by name of a parameter, over how many processes FSDP2 averages its gradient."""
    meshes = meshes_of(model)
    named = [(name, meshes.get(id(p))) for name, p in model.named_parameters() if is_sharded_tensor(p)]
    return {name: mesh.size() for name, mesh in named if mesh is not None}


def meshes_of(model: nn.Module) -> dict[int, Any]:
    """Return the mesh over which FSDP2 divides each parameter, by the parameter's `id`."""
    given = [(module, fsdp_mesh(module)) for module in fsdp_modules(model)]
    # outer modules come first, so that the innermost one counts
    return {id(p): mesh for module, mesh in given if mesh is not None for p in module.parameters()}


def tensor_parallel_ranks(model: nn.Module) -> dict[str, list[int]]:
    """List, by name of each parameter that tensor parallelism divides, the ranks that hold its slices, ascending."""
    meshes, found = meshes_of(model), {}
    for name, parameter in model.named_parameters():
        if not is_sharded_tensor(parameter):
            continue
        sharded: Any = parameter
        ranks = slice_ranks(sharded, meshes.get(id(parameter))) or [dist.get_rank()]
        if len(ranks) > 1:
            found[name] = ranks
    return found


def slice_ranks(parameter: Any, data_mesh: Any) -> list[int]:
    """List the ranks that hold slices of a parameter, ascending.

    Args:
        parameter: a DTensor.
        data_mesh: the mesh over which FSDP2 divides it, or its slices; `None` if it does not.

    Returns:
        `list[int]`: those that are at the same place of the data-parallel mesh as this process; empty if tensor
        parallelism does not divide the parameter.
    """
    if data_mesh is None:
        return sorted(int(rank) for rank in parameter.device_mesh.mesh.flatten())
    names = parameter.device_mesh.mesh_dim_names or ()
    extra = tuple(name for name in names if name not in (data_mesh.mesh_dim_names or ()))
    if parameter.device_mesh.ndim == data_mesh.ndim or not extra:
        return []
    ranks = parameter.device_mesh[extra].mesh.flatten()
    return sorted(int(rank) for rank in ranks)


@dataclass(frozen=True)
class RowDivision:
    """The processes that work on the same rows.

    Attributes:
        index: the group of this process.
        count: number of groups.
        ranks: the processes of this group, ascending.
        rank: this process.
        of_rank: the group of every process.
        group: the process group of `ranks`; `None` where they are one or all.
    """

    index: int
    count: int
    ranks: tuple[int, ...]
    rank: int
    of_rank: tuple[int, ...]
    group: Any = None

    @classmethod
    def of(cls, model: nn.Module, processes: Processes) -> "RowDivision":
        """Find the groups. All processes call this together.

        Raises:
            PeerProcessError: another process died.
        """
        if processes.num_processes == 1 or not is_sharded(model):
            return cls.by_process(processes)
        mine = tuple(next(iter(tensor_parallel_ranks(model).values()), [processes.process_index]))
        everywhere = [tuple(group) for group in processes.gather(list(mine))]
        groups = sorted(set(everywhere))
        of_rank = tuple(groups.index(group) for group in everywhere)
        made = [dist.new_group(list(ranks)) for ranks in groups] if len(mine) > 1 and len(groups) > 1 else []
        index = groups.index(mine)
        return cls(index, len(groups), mine, processes.process_index, of_rank, made[index] if made else None)

    @classmethod
    def by_process(cls, processes: Processes) -> "RowDivision":
        """Give every process rows of its own."""
        rank, count = processes.process_index, processes.num_processes
        return cls(rank, count, (rank,), rank, tuple(range(count)))

    def share(self, count: int) -> range:
        """Return the part of `count` items that falls to the group of this process."""
        return share_of(count, self.index, self.count)

    def total(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum a tensor over the processes of the group, which then have the same bits."""
        if len(self.ranks) == 1:
            return tensor
        parts = [torch.empty_like(tensor) for _ in self.ranks]
        dist.all_gather(parts, tensor.contiguous(), group=self.group)
        return torch.stack(parts).sum(0)

    @property
    def is_leader(self) -> bool:
        """Tell whether this process writes what its group has computed."""
        return self.rank == self.ranks[0]


def held_indices(tensor: Any, dim: int, first: int = 0) -> Tensor:
    """List the indices along a dimension of a DTensor that this process' part has, in the order that they have there.

    Args:
        tensor: a DTensor.
        dim: the dimension.
        first: the first dimension of the mesh that is looked at.
    """
    mesh, view = tensor.device_mesh, [1] * tensor.ndim
    place = mesh.get_coordinate()
    held = torch.arange(tensor.shape[dim])
    # dimensions of the mesh in their order: those of FSDP2 come first, and are strided where tensor parallelism has
    # cut the same dimension before
    for along, placement in list(enumerate(tensor.placements))[first:]:
        if getattr(placement, "dim", None) == dim:
            view[dim] = -1
            parts, _ = placement._split_tensor(held.view(view), mesh.size(along), with_padding=False)
            held = parts[place[along]].flatten()
    return held


def slice_indices(parameter: Any) -> list[Tensor | None]:
    """List, for every dimension of a parameter, the indices that tensor parallelism gives to this process.

    Where FSDP2 divides the slices again and has not gathered them, its dimensions of the mesh are the outer ones.

    Returns:
        `list[torch.Tensor | None]`: `None` for a dimension that is whole.
    """
    found = [held_indices(parameter, dim, parameter.device_mesh.ndim - 1) for dim in range(parameter.ndim)]
    return [None if len(one) == size else one for one, size in zip(found, parameter.shape, strict=True)]


def runs_of(indices: Tensor) -> list[tuple[int, int, int]]:
    """Cut indices into runs of consecutive ones: `(first index, position of it, position behind the last)`."""
    edges = [0, *((indices[1:] != indices[:-1] + 1).nonzero().flatten() + 1).tolist(), len(indices)]
    return [(int(indices[low]), low, high) for low, high in pairwise(edges) if high > low]


def flat_spans(tensor: torch.Tensor) -> list[tuple[int, torch.Tensor]]:
    """Cut this process' part of a tensor into runs that are contiguous in the whole, flattened tensor.

    Args:
        tensor: a DTensor, or a plain tensor, which is its own part.

    Returns:
        `(start, values)`: values of the flattened whole from position `start`.
    """
    if not is_sharded_tensor(tensor):
        return [(0, tensor.reshape(-1))]
    whole: Any = tensor
    local = whole.to_local()
    if local.numel() == 0:
        return []
    strides = [1] * whole.ndim
    for dim in reversed(range(whole.ndim - 1)):
        strides[dim] = strides[dim + 1] * whole.shape[dim + 1]
    # dimensions after the last one that is cut are whole, so that a run covers them
    cut = [dim for dim in range(whole.ndim) if local.shape[dim] != whole.shape[dim]]
    last = cut[-1] if cut else 0
    held = [held_indices(whole, dim).tolist() for dim in range(last)]
    runs = runs_of(held_indices(whole, last)) if cut else [(0, 0, local.shape[0] if local.ndim else 1)]
    rows = local.reshape(math.prod(local.shape[:last]), local.shape[last] if local.ndim else 1, -1)
    spans = []
    for row, indices in zip(rows, product(*held), strict=True):
        start = sum(index * stride for index, stride in zip(indices, strides[:last], strict=True))
        for first, low, high in runs:
            spans.append((start + first * (strides[last] if strides else 1), row[low:high].reshape(-1)))
    return spans
