"""The layer rules of the library, one small function per layer type, and their registry.

A rule turns the input and the output gradient of one call of a layer into per-sample gradients of its parameters.
Start reading at `registry`, then `linear`. Rules import torch, the layer types of transformers, and `workspace` and
`outer` beside this package; they know nothing of passes, hooks or models.
"""

from hf_trak.gradient_computers.hooked.rules import conv, embedding, linear, norm  # noqa: F401  # they register theirs
from hf_trak.gradient_computers.hooked.rules.registry import LayerCall, register_layer_rule, unregister_layer_rule

__all__ = ["LayerCall", "register_layer_rule", "unregister_layer_rule"]
