"""Layers of a model for libraries that know `nn.Linear` and little else."""

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D


@torch.no_grad()
def without_conv1d(model: nn.Module) -> nn.Module:
    """GPT-2 with an equal `nn.Linear` in the place of every `Conv1D`; the model itself is changed."""
    for name, module in list(model.named_modules()):
        if isinstance(module, Conv1D):
            linear = nn.Linear(*module.weight.shape)
            linear.weight.copy_(module.weight.T)
            linear.bias.copy_(module.bias)
            model.set_submodule(name, linear.requires_grad_(module.weight.requires_grad))
    return model


def trained_layers(model: nn.Module, *kinds: type[nn.Module]) -> list[str]:
    """Names of layers of these kinds that were trained and share no weight with an embedding.

    A LoRA model has its adapters left. A weight that is an embedding, too, has gradients of both uses. Curvature in
    factors knows one of them.
    """
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    return [
        name
        for name, module in model.named_modules()
        if type(module) in kinds and module.weight.requires_grad and id(module.weight) not in embeddings
    ]
