"""Wrappers around a model that leave its parameters whole, but give them other names."""

from typing import Any

import torch

from hf_trak._compat import class_if_imported
from hf_trak.runtime.zero import without_engine


def without_wrappers(model: Any) -> Any:
    """Take off `torch.compile`, `DataParallel`, `DistributedDataParallel` and DeepSpeed's engine, in whatever order.

    They prepend `_orig_mod.` and `module.` to the names of parameters, and split batches or compile code, of which
    per-sample gradients have no use. The model inside is the one that was trained.

    Args:
        model (`torch.nn.Module`):
            The model. Anything else is returned as it is.
    """
    # `is_compiled_module` of accelerate imports the compiler for this, which takes a second
    compiled = class_if_imported("torch._dynamo.eval_frame", "OptimizedModule")
    while True:
        inner = without_engine(model)
        if inner is not model:
            model = inner
        elif isinstance(model, torch.nn.DataParallel | torch.nn.parallel.DistributedDataParallel):
            model = model.module
        elif compiled is not None and isinstance(model, compiled):
            model = model._orig_mod
        elif isinstance(model, torch.nn.Module) and "_orig_mod" in vars(model):  # accelerate's regional compilation
            model = vars(model)["_orig_mod"]
        else:
            return model
