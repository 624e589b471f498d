"""One small rule per layer type."""

from hf_trak.gradient_computers.hooked.rules import conv, embedding, linear, norm
from hf_trak.gradient_computers.hooked.rules.registry import (
    LayerCall,
    Piece,
    find_rule,
    pieces_of,
    register_layer_rule,
    registered_types,
    unregister_layer_rule,
)

__all__ = [
    "LayerCall",
    "Piece",
    "conv",
    "embedding",
    "find_rule",
    "linear",
    "norm",
    "pieces_of",
    "register_layer_rule",
    "registered_types",
    "unregister_layer_rule",
]
