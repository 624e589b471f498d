"""Classifiers written as language models that predict one token, for a library that attributes nothing else.

A row is the classifier's input followed by its label; the logits of every position are the classifier's, and only the
label counts. Every layer is an `nn.Linear` over `(N, S, I)`, which is what `bergson` takes gradients of: convolutions
become products with patches, BERT's pooler works on a sequence of one. Weights and function are the classifier's.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, BertConfig, BertModel, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

GREYS = 17
"""Values of a pixel of scikit-learn's digits."""


class LabelConfig(PreTrainedConfig):
    """`bert`: the configuration of the classifier, or `None` for the CNN."""

    model_type = "label_as_token"

    def __init__(self, bert: dict[str, Any] | None = None, max_position_embeddings: int = 2048, **kwargs: Any) -> None:
        self.bert = bert
        self.max_position_embeddings = max_position_embeddings
        super().__init__(**kwargs)


class ImageLogits(nn.Module):
    """The CNN over 64 tokens, one for each pixel."""

    def __init__(self) -> None:
        super().__init__()
        self.pixels = nn.Embedding(GREYS, 1)
        self.first, self.second, self.head = nn.Linear(9, 16), nn.Linear(144, 32), nn.Linear(512, 10)

    def forward(self, tokens: Tensor) -> Tensor:
        """`(N, 1, C)`."""
        image = self.pixels(tokens).reshape(-1, 1, 8, 8)
        for layer, stride in ((self.first, 1), (self.second, 2)):
            patches = nn.functional.unfold(image, 3, padding=1, stride=stride).transpose(1, 2)
            size = image.shape[-1] // stride
            image = layer(patches).relu().transpose(1, 2).unflatten(2, (size, size))
        return self.head(image.flatten(1)[:, None])

    def take(self, network: nn.Module) -> None:
        self.pixels.weight.copy_(torch.arange(GREYS)[:, None] / (GREYS - 1))
        layers = [layer for layer in network.modules() if isinstance(layer, nn.Conv2d | nn.Linear)]
        for own, other in zip((self.first, self.second, self.head), layers, strict=True):
            own.load_state_dict({"weight": other.weight.flatten(1), "bias": other.bias})


class TextLogits(nn.Module):
    """BertForSequenceClassification; token 0 is padding."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.bert = BertModel(config, add_pooling_layer=False)
        self.pooler = nn.Linear(config.hidden_size, config.hidden_size)
        self.head = nn.Linear(config.hidden_size, config.num_labels)

    def forward(self, tokens: Tensor) -> Tensor:
        """`(N, 1, C)`."""
        hidden = self.bert(tokens, attention_mask=(tokens != 0).long()).last_hidden_state
        return self.head(self.pooler(hidden[:, :1]).tanh())

    def take(self, network: Any) -> None:
        self.bert.load_state_dict({k: v for k, v in network.bert.state_dict().items() if not k.startswith("pooler")})
        self.pooler.load_state_dict(network.bert.pooler.dense.state_dict())
        self.head.load_state_dict(network.classifier.state_dict())


class LabelAsToken(PreTrainedModel):
    """Logits of the label at every position of `input_ids` `(N, T + 1)`, whose last token, the label, is not read."""

    config_class = LabelConfig

    def __init__(self, config: LabelConfig) -> None:
        super().__init__(config)
        bert = None if config.bert is None else BertConfig(**config.bert)
        self.logits = ImageLogits() if bert is None else TextLogits(bert)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.logits.pixels if isinstance(self.logits, ImageLogits) else self.logits.bert.get_input_embeddings()

    def forward(self, input_ids: Tensor, **kwargs: Any) -> CausalLMOutput:
        logits = self.logits(input_ids[:, :-1])
        return CausalLMOutput(logits=logits.expand(-1, input_ids.shape[1], -1))


AutoConfig.register(LabelConfig.model_type, LabelConfig)
AutoModelForCausalLM.register(LabelConfig, LabelAsToken)


def label_as_token(classifier: nn.Module) -> LabelAsToken:
    """The language model of a classifier of this comparison."""
    config = getattr(classifier, "config", None)
    settings = None if config is None else {**config.to_dict(), "attn_implementation": "eager"}
    model = LabelAsToken(LabelConfig(bert=settings))
    with torch.no_grad():
        model.logits.take(classifier)
    return model.eval()
