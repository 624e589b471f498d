"""Image and text classification tasks on real models and in every calling convention."""

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from torch.func import grad, vmap
from transformers import BertConfig, BertForSequenceClassification, ViTConfig, ViTForImageClassification

from hf_trak.gradient_computers import make_gradient_computer
from hf_trak.modelout_functions import (
    ImageClassificationModelOutput,
    IterativeImageClassificationModelOutput,
    TextClassificationModelOutput,
)

IMAGE_TASKS = [ImageClassificationModelOutput, IterativeImageClassificationModelOutput]


@pytest.fixture(scope="module")
def digits() -> tuple[torch.Tensor, torch.Tensor]:
    images, labels = load_digits(return_X_y=True)
    return torch.tensor(images[:12] / 16, dtype=torch.float32).reshape(-1, 1, 8, 8), torch.tensor(labels[:12])


@pytest.fixture
def cnn() -> torch.nn.Module:
    torch.manual_seed(1)
    layers = [torch.nn.Conv2d(1, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.ReLU(), torch.nn.Flatten()]
    return torch.nn.Sequential(*layers, torch.nn.Linear(144, 10)).eval()


@pytest.fixture
def vit() -> torch.nn.Module:
    config = ViTConfig(
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=24,
        image_size=8,
        patch_size=4,
        num_channels=1,
        num_labels=10,
    )
    return ViTForImageClassification(config).eval()


@pytest.fixture
def bert() -> torch.nn.Module:
    config = BertConfig(
        vocab_size=40,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=24,
        max_position_embeddings=16,
        num_labels=3,
    )
    return BertForSequenceClassification(config).eval()


@pytest.fixture
def text() -> dict[str, torch.Tensor]:
    mask = torch.ones(4, 9, dtype=torch.long)
    mask[0, 5:] = 0
    return {
        "input_ids": torch.randint(0, 40, (4, 9)),
        "token_type_ids": torch.randint(0, 2, (4, 9)),
        "attention_mask": mask,
        "labels": torch.tensor([0, 2, 1, 1]),
    }


def reference(logits: torch.Tensor, labels: torch.Tensor, temperature: float = 1.0) -> tuple[np.ndarray, np.ndarray]:
    """f and q from probabilities in float64, as the paper writes them."""
    rows = np.arange(len(labels))
    p = logits.detach().double().softmax(-1).numpy()[rows, labels.numpy()]
    tempered = (logits.detach().double() / temperature).softmax(-1).numpy()[rows, labels.numpy()]
    return np.log(p / (1 - p)), 1 - tempered


@pytest.mark.parametrize("cls", IMAGE_TASKS)
@pytest.mark.parametrize("label_name", ["labels", "label"])
def test_mapping_and_tuple_batches_give_the_paper_formula(cls, label_name, vit, digits):
    images, labels = digits
    task = cls(temperature=2.0)
    mapping = {"pixel_values": images, label_name: labels}
    f, q = reference(vit(images).logits, labels, 2.0)
    for batch in (mapping, (images, labels), [images, labels]):
        args, kwargs = task.model_inputs(batch)
        assert label_name not in kwargs
        result = vit(*args, **kwargs)
        output = task.output(result, batch)
        assert output.requires_grad
        np.testing.assert_allclose(output.detach().numpy(), f, rtol=1e-5, atol=1e-6)
        weights = task.out_to_loss_grad(result, batch)
        assert not weights.requires_grad
        np.testing.assert_allclose(weights.numpy(), q, rtol=1e-5)
        np.testing.assert_allclose(task.get_out_to_loss_grad(vit, None, None, batch).numpy(), q, rtol=1e-5)


def test_the_labels_are_not_passed_to_the_model(vit, digits):
    """With labels the model would compute a mean over the batch."""
    task = ImageClassificationModelOutput()
    args, kwargs = task.model_inputs({"pixel_values": digits[0], "labels": digits[1]})
    assert args == () and set(kwargs) == {"pixel_values"}
    assert vit(**kwargs).loss is None


def test_functional_form_is_one_sample_and_differentiable_under_vmap(cnn, digits):
    """`vmap(grad(get_output))`, as the `trak` API calls it, equals autograd on every sample alone."""
    images, labels = digits
    weights, buffers = dict(cnn.named_parameters()), dict(cnn.named_buffers())
    get_output = ImageClassificationModelOutput().get_output
    in_dims = (None, None, None, 0, 0)
    vectorized = vmap(grad(get_output, argnums=1), in_dims=in_dims)(cnn, weights, buffers, images, labels)
    outputs = vmap(get_output, in_dims=in_dims)(cnn, weights, buffers, images, labels)
    for row in range(len(labels)):
        single = ImageClassificationModelOutput.get_output(cnn, weights, buffers, images[row], labels[row])
        assert single.shape == ()
        torch.testing.assert_close(outputs[row], single)
        p = cnn(images[row : row + 1]).double().softmax(-1)[0, labels[row]]
        expected = torch.autograd.grad((p / (1 - p)).log(), list(weights.values()))
        for name, gradient in zip(weights, expected, strict=True):
            torch.testing.assert_close(vectorized[name][row], gradient, rtol=1e-4, atol=1e-5)


def test_functional_form_uses_the_given_weights(cnn, digits):
    images, labels = digits
    zeros = {name: torch.zeros_like(weight) for name, weight in cnn.named_parameters()}
    buffers = dict(cnn.named_buffers())
    task = ImageClassificationModelOutput()
    # equal logits: p = 1/10
    expected = torch.tensor(1 / 9).log()
    torch.testing.assert_close(task.get_output(cnn, zeros, buffers, images[0], labels[0]), expected)
    torch.testing.assert_close(task.get_out_to_loss_grad(cnn, zeros, buffers, digits), torch.full((12,), 0.9))


def test_iterative_form_takes_a_batch_and_the_model_itself(cnn, digits):
    output = IterativeImageClassificationModelOutput.get_output(cnn, None, None, *digits)
    np.testing.assert_allclose(output.detach().numpy(), reference(cnn(digits[0]), digits[1])[0], rtol=1e-4, atol=1e-5)
    assert all(g is not None for g in torch.autograd.grad(output.sum(), list(cnn.parameters())))


@pytest.mark.parametrize("cls", IMAGE_TASKS)
def test_a_sample_does_not_depend_on_its_batch(cls, cnn, digits):
    """f and q of a sample are the same alone and among others."""
    task = cls()
    whole = task.output(cnn(digits[0]), digits), task.out_to_loss_grad(cnn(digits[0]), digits)
    for row in range(12):
        single = tuple(tensor[row : row + 1] for tensor in digits)
        logits = cnn(single[0])
        torch.testing.assert_close(task.output(logits, single), whole[0][row : row + 1], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(task.out_to_loss_grad(logits, single), whole[1][row : row + 1], rtol=1e-5, atol=0)


def test_text_mapping_and_tuple_and_single_sample_agree(bert, text):
    task = TextClassificationModelOutput(temperature=0.5)
    as_tuple = tuple(text[name] for name in ("input_ids", "token_type_ids", "attention_mask", "labels"))
    inputs = {name: tensor for name, tensor in text.items() if name != "labels"}
    f, q = reference(bert(**inputs).logits, text["labels"], 0.5)
    for batch in (text, as_tuple):
        args, kwargs = task.model_inputs(batch)
        assert args == () and set(kwargs) == set(inputs)
        result = bert(**kwargs)
        np.testing.assert_allclose(task.output(result, batch).detach().numpy(), f, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(task.out_to_loss_grad(result, batch).numpy(), q, rtol=1e-5)
    weights, buffers = dict(bert.named_parameters()), dict(bert.named_buffers())
    for row in range(4):
        sample = [tensor[row] for tensor in as_tuple]
        single = TextClassificationModelOutput.get_output(bert, weights, buffers, *sample)
        assert float(single.detach()) == pytest.approx(f[row], rel=1e-4, abs=1e-5)


def test_text_inputs_beyond_those_of_the_trak_api_reach_the_model_by_name(text):
    """A mapping without token types (RoBERTa, DistilBERT) and with other inputs is passed as it is."""
    batch = {"input_ids": text["input_ids"], "position_ids": text["input_ids"], "labels": text["labels"]}
    _, kwargs = TextClassificationModelOutput().model_inputs(batch)
    assert set(kwargs) == {"input_ids", "position_ids"}


@pytest.mark.parametrize(
    "wrap",
    [
        lambda logits: logits,
        lambda logits: (logits,),
        lambda logits: (torch.tensor(0.3), logits, [torch.zeros(2, 2)]),
        lambda logits: {"loss": None, "logits": logits},
        lambda logits: type("Output", (), {"logits": logits})(),
    ],
)
def test_every_form_of_model_output_is_read(wrap):
    logits, labels = torch.randn(3, 4), torch.tensor([0, 1, 3])
    batch = (torch.zeros(3, 2), labels)
    output = ImageClassificationModelOutput().output(wrap(logits), batch)
    np.testing.assert_allclose(output.numpy(), reference(logits, labels)[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("label", [10, -1, -100])
def test_labels_outside_the_classes_are_named_on_every_path(label, cnn, digits):
    images, labels = digits[0], digits[1].clone()
    labels[7] = label
    batch = (images, labels)
    message = rf"Sample 7 of 12 has the label {label}, .*10 classes"
    task = ImageClassificationModelOutput()
    with pytest.raises(ValueError, match=message):
        task.out_to_loss_grad(cnn(images), batch)
    with pytest.raises(ValueError, match=message):
        task.get_out_to_loss_grad(cnn, dict(cnn.named_parameters()), dict(cnn.named_buffers()), batch)
    with pytest.raises(ValueError, match=message):
        IterativeImageClassificationModelOutput.get_output(cnn, None, None, images, labels)

    def q_of_one(image, label):
        single = (image.unsqueeze(0), label.unsqueeze(0))
        f = task.output(cnn(single[0]), single).squeeze(0)
        return f, task.out_to_loss_grad(cnn(single[0]), single).squeeze(0)

    with pytest.raises(ValueError, match=message):
        vmap(grad(q_of_one, has_aux=True))(images, labels)


@pytest.mark.parametrize("engine", ["functional", "iterative", "hooked"])
@pytest.mark.parametrize("form", ["tuple", "mapping"])
def test_no_engine_lets_a_label_outside_the_classes_pass(engine, form, vit, digits):
    labels = digits[1].clone()
    labels[7] = 10
    batch = (digits[0], labels) if form == "tuple" else {"pixel_values": digits[0], "labels": labels}
    computer = make_gradient_computer(engine, vit, ImageClassificationModelOutput(), grad_wrt=None, device="cpu")
    with pytest.raises(ValueError, match="has the label 10, but the model has 10 classes"):
        computer.stream(batch, lambda start, block: None)


def test_what_cannot_be_a_classification_batch_is_refused(cnn, digits):
    images, labels = digits
    task = ImageClassificationModelOutput()
    for batch, message in (
        ({"pixel_values": images}, "none hold labels"),
        ({"pixel_values": images, "label": labels, "labels": labels}, "exactly one"),
        ((images,), "at least two"),
        (images, "a Tensor"),
        ((images, labels.float()), "integer class indices"),
        ((images, torch.nn.functional.one_hot(labels)), "one class index per sample"),
        ((images, labels.tolist()), "Expected a tensor of integers"),
    ):
        with pytest.raises((ValueError, TypeError), match=message):
            task.model_inputs(batch)
    for logits, message in (
        (torch.zeros(12, 1), "one class"),
        (torch.zeros(12, 5, 10), "number of classes"),
        (torch.zeros(11, 10), "for 12 label"),
        ({"prediction": torch.zeros(12, 10)}, "keys .'prediction'."),
        (None, "NoneType"),
    ):
        with pytest.raises((ValueError, TypeError), match=message):
            task.output(logits, digits)
    with pytest.raises(ValueError, match="Expected four"):
        TextClassificationModelOutput().model_inputs((images, labels))


@pytest.mark.parametrize("temperature", [0.0, -1.0, float("nan"), float("inf")])
def test_temperature_must_be_positive(temperature):
    with pytest.raises(ValueError, match="`temperature` is"):
        ImageClassificationModelOutput(temperature)
