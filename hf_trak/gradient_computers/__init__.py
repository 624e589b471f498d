"""Gradient computers: a model, a task and a batch in; blocks of per-sample gradients out.

`base` has the contract, and `layout` the order of the parameters. The engines are `hooked/` (one pass over the batch),
`functional` (vmap) and `iterative` (one sample at a time). `auto` chooses among them, and checks the choice on the
first batch against plain autograd (`self_check`, `tolerance`, `padding`). `sharded` is the hooked engine on models
that are divided over processes, `sharded_check` its check. `environment` has what engines change for one pass,
`activation_checkpointing` among it. `per_sample` is the public function without tasks. Start reading at `auto`, or at
the map in `hooked/__init__`.

Public names are imported when they are first used: a record of a training needs `layout` alone. The package imports
tasks (`hf_trak.modelout_functions`), free memory and `_compat`. It knows no files and no projections.
"""

from typing import TYPE_CHECKING

from hf_trak._lazy import lazy_exports

if TYPE_CHECKING:
    from hf_trak.gradient_computers.auto import ENGINES as ENGINES
    from hf_trak.gradient_computers.auto import AutoGradientComputer as AutoGradientComputer
    from hf_trak.gradient_computers.auto import make_gradient_computer as make_gradient_computer
    from hf_trak.gradient_computers.base import AbstractGradientComputer as AbstractGradientComputer
    from hf_trak.gradient_computers.base import BatchOutputs as BatchOutputs
    from hf_trak.gradient_computers.base import GradientSink as GradientSink
    from hf_trak.gradient_computers.base import batch_size_of as batch_size_of
    from hf_trak.gradient_computers.functional import FunctionalGradientComputer as FunctionalGradientComputer
    from hf_trak.gradient_computers.hooked.batched_op import BatchedOp as BatchedOp
    from hf_trak.gradient_computers.hooked.batched_op import register_op_handler as register_op_handler
    from hf_trak.gradient_computers.hooked.batched_op import unregister_op_handler as unregister_op_handler
    from hf_trak.gradient_computers.hooked.computer import HookedGradientComputer as HookedGradientComputer
    from hf_trak.gradient_computers.hooked.rules import LayerCall as LayerCall
    from hf_trak.gradient_computers.hooked.rules import register_layer_rule as register_layer_rule
    from hf_trak.gradient_computers.hooked.rules import unregister_layer_rule as unregister_layer_rule
    from hf_trak.gradient_computers.iterative import IterativeGradientComputer as IterativeGradientComputer
    from hf_trak.gradient_computers.layout import ParameterLayout as ParameterLayout
    from hf_trak.gradient_computers.layout import ParameterSlot as ParameterSlot
    from hf_trak.gradient_computers.per_sample import per_sample_gradients as per_sample_gradients

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "hf_trak.gradient_computers.auto": "ENGINES AutoGradientComputer make_gradient_computer",
        "hf_trak.gradient_computers.base": "AbstractGradientComputer BatchOutputs GradientSink batch_size_of",
        "hf_trak.gradient_computers.functional": "FunctionalGradientComputer",
        "hf_trak.gradient_computers.hooked.batched_op": "BatchedOp register_op_handler unregister_op_handler",
        "hf_trak.gradient_computers.hooked.computer": "HookedGradientComputer",
        "hf_trak.gradient_computers.hooked.rules": "LayerCall register_layer_rule unregister_layer_rule",
        "hf_trak.gradient_computers.iterative": "IterativeGradientComputer",
        "hf_trak.gradient_computers.layout": "ParameterLayout ParameterSlot",
        "hf_trak.gradient_computers.per_sample": "per_sample_gradients",
    },
)
