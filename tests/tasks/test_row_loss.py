"""The task `row_loss`: gradients of minus the loss of every row against plain autograd on the row alone."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers as tf
from datasets import Dataset
from torch import Tensor, nn
from trak_options import trak_config

from hf_trak import TrakAttributor
from hf_trak.modelout_functions import RowLossModelOutput

SPEECH = {
    "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 20,
    "conv_dim": (8, 8), "conv_stride": (4, 2), "conv_kernel": (8, 4), "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, "vocab_size": 9, "pad_token_id": 0,
    "feat_extract_norm": "layer", "do_stable_layer_norm": True, "conv_bias": True,
}  # fmt: skip
PIXELS = {
    "num_labels": 3, "num_encoder_blocks": 2, "depths": [1, 1], "sr_ratios": [2, 1], "hidden_sizes": [8, 16],
    "patch_sizes": [3, 3], "strides": [2, 2], "num_attention_heads": [1, 2], "mlp_ratios": [2, 2],
    "decoder_hidden_size": 8,
}  # fmt: skip
SERIES = {
    "prediction_length": 4, "context_length": 6, "lags_sequence": [1, 2], "d_model": 8, "encoder_layers": 1,
    "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 8,
    "decoder_ffn_dim": 8, "num_time_features": 1,
}  # fmt: skip


def speech(reduction: str) -> tuple[nn.Module, list[dict[str, Any]], Any]:
    model = tf.Wav2Vec2ForCTC(tf.Wav2Vec2Config(ctc_loss_reduction=reduction, **SPEECH))
    lengths = ((400, 5), (260, 2), (330, 3), (400, 1))
    rows = [
        {"input_values": torch.randn(frames).tolist(), "labels": torch.randint(1, 9, (count,)).tolist()}
        for frames, count in lengths
    ]
    return model, rows, padded_speech


def padded_speech(rows: list[dict[str, Any]]) -> dict[str, Tensor]:
    """Pad frames with a mask and labels with −100, as speech collators do."""

    def padded(name: str, value: float, dtype: torch.dtype) -> Tensor:
        columns = [torch.tensor(row[name], dtype=dtype) for row in rows]
        return nn.utils.rnn.pad_sequence(columns, True, value)

    values = padded("input_values", torch.nan, torch.float32)
    return {
        "input_values": values.nan_to_num(0.0),
        "attention_mask": (~values.isnan()).long(),
        "labels": padded("labels", -100, torch.long),
    }


def segmentation() -> tuple[nn.Module, list[dict[str, Any]], Any]:
    rows = [
        {
            "pixel_values": torch.randn(3, 16, 16).tolist(),
            # unlike shares of pixels without a label, which count for nothing
            "labels": torch.randint(0, 3, (16, 16)).masked_fill(torch.rand(16, 16) < 0.2 * row, 255).tolist(),
        }
        for row in range(4)
    ]
    return tf.SegformerForSemanticSegmentation(tf.SegformerConfig(**PIXELS)), rows, None


def detection() -> tuple[nn.Module, list[dict[str, Any]], Any]:
    sizes: dict[str, Any] = {"embedding_size": 8, "hidden_sizes": [8, 8], "depths": [1, 1], "layer_type": "basic"}
    backbone = tf.ResNetConfig(out_features=["stage2"], **sizes)
    layers = {f"{part}_{name}": 2 for part in ("encoder", "decoder") for name in ("attention_heads", "layers")}
    config = tf.DetrConfig(
        use_timm_backbone=False, use_pretrained_backbone=False, backbone=None, backbone_config=backbone, d_model=16,
        encoder_ffn_dim=16, decoder_ffn_dim=16, num_queries=5, num_labels=3, **layers,
    )  # fmt: skip
    rows = [
        {
            "pixel_values": torch.randn(3, 32, 32),
            "labels": {
                "class_labels": torch.randint(0, 3, (count,)),
                "boxes": torch.rand(count, 4) * 0.4 + 0.3,
            },
        }
        for count in (1, 3, 2, 2)
    ]
    return tf.DetrForObjectDetection(config), rows, boxed


def boxed(rows: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "pixel_values": torch.stack([row["pixel_values"] for row in rows]),
        "labels": [row["labels"] for row in rows],
    }


def series() -> tuple[nn.Module, list[dict[str, Any]], Any]:
    rows = [
        {
            "past_values": torch.randn(8).cumsum(0).tolist(),
            "past_time_features": torch.randn(8, 1).tolist(),
            "past_observed_mask": [1.0] * 8,
            "future_values": torch.randn(4).tolist(),
            "future_time_features": torch.randn(4, 1).tolist(),
        }
        for _ in range(3)
    ]
    return tf.TimeSeriesTransformerForPrediction(tf.TimeSeriesTransformerConfig(**SERIES)), rows, None


class OwnLoss(nn.Module):
    """A model of a user: returns predictions, and no loss."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(3, 2)

    def forward(self, inputs: Tensor, labels: Tensor | None = None) -> Any:
        return SimpleNamespace(predicted=self.head(inputs).sin())


def own_loss(model_output: Any, batch: Any) -> Tensor:
    return (model_output.predicted - batch["labels"]).abs().sum(dim=1)


def own() -> tuple[nn.Module, list[dict[str, Any]], Any]:
    return OwnLoss(), [{"inputs": torch.randn(3).tolist(), "labels": [0.5, -0.25]} for _ in range(4)], None


CASES: dict[str, tuple[Any, int]] = {
    "speech": (lambda: speech("sum"), 4),
    "speech mean": (lambda: speech("mean"), 4),
    "segmentation": (segmentation, 4),
    "detection": (detection, 1),
    "series": (series, 1),
    "own": (own, 4),
}
"""Models and rows, and the rows in a batch."""


def attributor(
    directory: Path, model: nn.Module, rows: Any, collator: Any, size: int, task: Any = "row_loss", **options: Any
) -> TrakAttributor:
    settings = {"proj_type": "none", "use_cpu": True, "feature_dtype": "float32", **options}
    config = trak_config(output_dir=str(directory), per_device_batch_size=size, **settings)
    return TrakAttributor(model, config, rows, collator, task=task)


def as_dataset(rows: list[dict[str, Any]], collator: Any) -> Any:
    return rows if collator is boxed else Dataset.from_list(rows)


def alone(model: nn.Module, row: dict[str, Any], collator: Any) -> Tensor:
    """Plain autograd of minus the loss of one row."""
    batch = (tf.default_data_collator if collator is None else collator)([row])
    out = model(**batch)
    loss = own_loss(out, batch)[0] if isinstance(model, OwnLoss) else out.loss
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    taken = torch.autograd.grad(-loss, parameters, allow_unused=True)
    filled = [torch.zeros_like(p) if g is None else g for g, p in zip(taken, parameters, strict=True)]
    return torch.cat([gradient.flatten() for gradient in filled])


@pytest.mark.few(3)
@pytest.mark.parametrize("case", CASES)
def test_features_are_the_gradients_of_minus_the_loss_of_each_row(case: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    make, size = CASES[case]
    model, rows, collator = make()
    model.eval()
    task = RowLossModelOutput(own_loss) if case == "own" else "row_loss"
    made = attributor(tmp_path, model, as_dataset(rows, collator), collator, size, task).featurize()
    found = torch.cat([shard.grads for shard in made.features.store.train(0)])
    expected = torch.stack([alone(model, row, collator) for row in rows])
    error = (found - expected).norm(dim=1) / expected.norm(dim=1)
    assert bool((expected.norm(dim=1) > 1e-3).all())
    assert float(error.max()) <= 1e-5
    assert all(bool((shard.out_to_loss == 1).all()) for shard in made.features.store.train(0))


@pytest.mark.parametrize("make", [series, detection])
def test_a_loss_of_several_rows_is_taken_row_by_row(
    make: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(0)
    model, rows, collator = make()
    made = attributor(tmp_path, model.eval(), as_dataset(rows, collator), collator, 3).featurize()
    found = torch.cat([shard.grads for shard in made.features.store.train(0)])
    expected = torch.stack([alone(model, row, collator) for row in rows])
    assert float(((found - expected).norm(dim=1) / expected.norm(dim=1)).max()) <= 1e-5
    assert "slower iterative engine" in caplog.text and "for a batch of 3 rows" in caplog.text


def test_a_model_without_a_loss_is_refused(tmp_path: Path) -> None:
    model, rows, _ = own()
    made = attributor(tmp_path, model, Dataset.from_list(rows), None, 1)
    with pytest.raises(
        ValueError, match=r"returned a SimpleNamespace without a loss.*\['inputs', 'labels'\].*loss_fn"
    ):
        made.featurize()


def test_a_loss_function_has_to_be_one_that_keeps_rows_apart(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="`loss_fn` is 'mse'"):
        RowLossModelOutput("mse")  # type: ignore[arg-type]
    model, rows, _ = own()
    task = RowLossModelOutput(lambda output, batch: output.predicted.mean())
    with pytest.raises(ValueError, match="`loss_fn` returned a tensor of shape"):
        attributor(tmp_path, model, Dataset.from_list(rows), None, 4, task).featurize()


def test_a_row_with_no_labelled_pixel_has_no_gradient(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, rows, _ = segmentation()
    rows[1]["labels"] = torch.full((16, 16), 255).tolist()
    made = attributor(tmp_path, model.eval(), Dataset.from_list(rows), None, 4).featurize()
    found = torch.cat([shard.grads for shard in made.features.store.train(0)])
    assert not found[1].any()
    assert bool(found[[0, 2, 3]].any(dim=1).all())


def test_a_copy_of_the_target_comes_first(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, rows, collator = speech("sum")
    made = attributor(tmp_path, model.eval(), Dataset.from_list(rows), collator, 4).featurize()
    scored = made.attribute(Dataset.from_list(rows), top_k=1)
    assert [row["trak_indices"][0] for row in scored] == [0, 1, 2, 3]
