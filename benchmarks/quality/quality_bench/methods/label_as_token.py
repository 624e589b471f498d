"""Classifiers written as language models that predict one token, for a library that attributes nothing else.

A row is two tokens, its number and its label. The logits at the first position are the classifier's for the row of
that number. Every layer with weights becomes an `nn.Linear` over `(N, S, I)`, which is what `bergson` takes gradients
of: convolutions become products with patches, and a layer that sees one vector per row sees a sequence of one. Weights
and function are the classifier's.
"""

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput


class LabelConfig(PreTrainedConfig):
    """Nothing of the classifier, which is known to the class of the model."""

    model_type = "label_as_token"


class Rows(nn.Module):
    """A linear layer over `(N, …, I)`, which sees `(N, S, I)`."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.linear = linear

    def forward(self, inputs: Tensor) -> Tensor:
        rows = inputs.reshape(len(inputs), -1, inputs.shape[-1])
        # bergson masks positions by those of tokens, unless a layer says which token each of its own belongs to.
        self.linear._positions = torch.zeros(rows.shape[:2], dtype=torch.long, device=rows.device)
        return self.linear(rows).reshape(*inputs.shape[:-1], -1)


class Patches(nn.Module):
    """A convolution as a linear layer on patches, whose features are channel by channel."""

    def __init__(self, convolution: nn.Conv2d) -> None:
        super().__init__()
        if convolution.groups != 1 or convolution.padding_mode != "zeros" or isinstance(convolution.padding, str):
            raise ValueError(
                f"{convolution} cannot be written as one product with patches. Expected one group, and zeros as "
                "padding, in numbers."
            )
        self.kernel: dict[str, Any] = {
            name: getattr(convolution, name) for name in ("kernel_size", "dilation", "padding", "stride")
        }
        features = convolution.weight[0].numel()
        linear = nn.Linear(features, convolution.out_channels, bias=convolution.bias is not None)
        linear.weight = nn.Parameter(convolution.weight.detach().flatten(1))
        linear.bias = convolution.bias
        self.rows = Rows(linear)

    @property
    def weight(self) -> Tensor:
        """That of the linear layer, whose type ViT asks for."""
        return self.rows.linear.weight

    def forward(self, images: Tensor) -> Tensor:
        patches = nn.functional.unfold(images, **self.kernel).transpose(1, 2)
        return self.rows(patches).transpose(1, 2).unflatten(2, self._size(images.shape[2:]))

    def _size(self, image: torch.Size) -> list[int]:
        """Rows and columns of the output."""
        names = ("kernel_size", "dilation", "padding", "stride")
        sides = zip(image, *(self.kernel[name] for name in names), strict=True)
        return [
            (size + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1
            for size, kernel, dilation, padding, stride in sides
        ]


def with_linear_layers(classifier: nn.Module) -> nn.Module:
    """The same classifier, its linear layers and convolutions exchanged for `Rows` and `Patches`.

    Raises:
        ValueError: a convolution has groups, or a padding that is not of zeros.
    """
    for name, layer in list(classifier.named_modules()):
        if isinstance(layer, nn.Linear):
            classifier.set_submodule(name, Rows(layer))
        elif isinstance(layer, nn.Conv2d):
            classifier.set_submodule(name, Patches(layer))
    return classifier


class LabelAsToken(PreTrainedModel):
    """Logits of the label at both positions of `input_ids`, `(N, 2)`; subclasses know a case.

    Attributes:
        make_model: makes the classifier.
        inputs: its arguments for all rows.
    """

    config_class = LabelConfig
    make_model: ClassVar[Callable[[], nn.Module]]
    inputs: ClassVar[dict[str, Tensor]]

    def __init__(self, config: LabelConfig) -> None:
        super().__init__(config)
        self.classifier = with_linear_layers(type(self).make_model())
        self.zero = nn.Embedding(1, 1)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        """Everything that makes vectors of inputs, and a zero that is added to those that are vectors already.

        The library requires gradients of these alone, and so lets them flow through all layers.
        """
        return nn.ModuleList([module for module in self.modules() if isinstance(module, nn.Embedding)])

    def forward(self, input_ids: Tensor, **kwargs: Any) -> CausalLMOutput:
        numbers = input_ids[:, 0].to(next(iter(self.inputs.values())).device)
        arguments = {name: tensor[numbers].to(input_ids.device) for name, tensor in self.inputs.items()}
        for name, tensor in arguments.items():
            if tensor.is_floating_point():
                arguments[name] = tensor + self.zero.weight
        logits = self.classifier(**arguments).logits
        return CausalLMOutput(logits=logits[:, None].expand(-1, input_ids.shape[1], -1))


def label_as_token(
    classifier: nn.Module, make_model: Callable[[], nn.Module], inputs: dict[str, Tensor]
) -> LabelAsToken:
    """The language model of a classifier, which `AutoModelForCausalLM` loads in this process.

    Args:
        classifier: is left as it is.
        make_model: makes another one of the same kind.
        inputs: the classifier's arguments for all rows, `(rows, …)`.
    """
    members = {"make_model": staticmethod(make_model), "inputs": inputs}
    of_case = type("LabelAsTokenOfCase", (LabelAsToken,), members)
    AutoConfig.register(LabelConfig.model_type, LabelConfig, exist_ok=True)
    AutoModelForCausalLM.register(LabelConfig, of_case, exist_ok=True)
    model = of_case(LabelConfig())
    filled = make_model()
    filled.load_state_dict(classifier.state_dict())
    model.classifier = with_linear_layers(filled)
    nn.init.zeros_(model.zero.weight)
    return model.eval()
