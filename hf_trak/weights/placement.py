"""Check that the parameters of a model are where per-sample gradients can be taken of them."""

import torch

from hf_trak._compat import class_if_imported
from hf_trak.runtime.sharding import is_sharded
from hf_trak.runtime.zero import can_gather, is_partitioned

_REMEDY = (
    "Supported: a copy of the model in every process; for a model too large for one device, FSDP2 (`fully_shard`), "
    "which is `fsdp_version: 2` of accelerate, ZeRO-3 of a running DeepSpeed, or one process and "
    "`from_pretrained(..., device_map='auto')` over its devices. Load the saved weights that way and pass that model "
    "(`accelerator.save_model`, or `accelerator.get_state_dict` and `save_pretrained`, write the full weights)."
)


def check_placement(model: torch.nn.Module) -> None:
    """Refuse anything but a module, and modules whose parameters are sharded in a way that is not supported, or not
    loaded.

    Raises:
        TypeError: `model` is not a module, but a name, a `Trainer`, or something else.
        ValueError: FSDP1, or ZeRO-3 whose processes are gone, keeps only a part of a parameter in this process, or a
            parameter is on the meta device (offloaded to CPU or disk, or never loaded). Names the parameter and the
            supported way.
    """
    if not isinstance(model, torch.nn.Module):
        given = repr(model) if isinstance(model, str) else f"a {type(model).__name__}"
        raise TypeError(
            f"`model` is {given}. Expected the trained model itself, a `torch.nn.Module`. Load it with "
            "`AutoModelFor….from_pretrained(name)`; from a `Trainer`, use `TrakAttributor.from_trainer(trainer)`."
        )
    fsdp1 = class_if_imported("torch.distributed.fsdp", "FullyShardedDataParallel")
    for name, module in model.named_modules() if fsdp1 is not None else ():
        if isinstance(module, fsdp1):
            raise ValueError(
                f"The module {name or type(model).__name__!r} is wrapped in FullyShardedDataParallel, which keeps "
                f"a shard of its parameters in each process. {_REMEDY}"
            )
    sharded = is_sharded(model)
    for name, parameter in model.named_parameters():
        if is_partitioned(parameter) and not can_gather():
            raise ValueError(
                f"The parameter {name!r} is partitioned by DeepSpeed ZeRO-3, whose processes are not connected. "
                f"{_REMEDY}"
            )
        if parameter.is_meta and not sharded:  # `check_plan` says it of those, to all processes
            raise ValueError(
                f"The parameter {name!r} is on the meta device: `device_map` has offloaded it to the CPU or the disk, "
                "or it was never loaded. Expected every parameter on a device. Give `device_map` more memory "
                "(`max_memory`), a smaller dtype, or more devices."
            )
