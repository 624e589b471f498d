"""Names, functions and models as tasks."""

from types import SimpleNamespace

import pytest
import torch
import transformers
from transformers import BertConfig, BertForSequenceClassification, ResNetConfig, ResNetForImageClassification

from hf_trak.modelout_functions import (
    TASK_TO_MODELOUT,
    AbstractModelOutput,
    CLIPModelOutput,
    FunctionModelOutput,
    ImageClassificationModelOutput,
    TextClassificationModelOutput,
    get_task,
    infer_task,
)


def test_names():
    assert set(TASK_TO_MODELOUT) >= {
        "image_classification",
        "iterative_image_classification",
        "text_classification",
        "clip",
        "loss",
    }
    for name, cls in TASK_TO_MODELOUT.items():
        assert type(get_task(name)) is cls
    assert get_task("clip") is not get_task("clip")


def test_unknown_names_and_objects_get_the_list():
    with pytest.raises(
        ValueError, match=r"'image_clasification' is unknown.*'image_classification'.*output_fn|function"
    ):
        get_task("image_clasification")
    for wrong in (3, None, dict, torch.nn.Linear(1, 1)):
        with pytest.raises(TypeError, match="image_classification"):
            get_task(wrong)


def test_instances_classes_and_functions():
    task = TextClassificationModelOutput(temperature=3.0)
    assert get_task(task) is task
    assert isinstance(get_task(ImageClassificationModelOutput), ImageClassificationModelOutput)

    class Own(AbstractModelOutput):
        def get_output(self, model, weights, buffers, *sample):
            return torch.zeros(())

        def get_out_to_loss_grad(self, model, weights, buffers, batch):
            return torch.zeros(1)

    assert isinstance(get_task(Own), Own)

    def first_logit(model_output, batch):
        return model_output[:, 0]

    wrapped = get_task(first_logit)
    assert isinstance(wrapped, FunctionModelOutput) and wrapped.output_fn is first_logit


def test_a_function_is_a_task():
    net = torch.nn.Linear(3, 2)
    batch = (torch.randn(5, 3), torch.arange(5) % 2)
    task = FunctionModelOutput(
        lambda output, batch: output[:, 0] * batch[-1], out_to_loss_fn=lambda output, batch: output[:, 1]
    )
    assert task.model_inputs(batch)[0] == (batch[0],) and task.model_inputs(batch)[1] == {}
    result = net(batch[0])
    torch.testing.assert_close(task.output(result, batch), result[:, 0] * batch[1])
    torch.testing.assert_close(task.out_to_loss_grad(result, batch), result[:, 1].detach())
    assert not task.out_to_loss_grad(result, batch).requires_grad
    single = task.get_output(net, dict(net.named_parameters()), {}, batch[0][1], batch[1][1])
    torch.testing.assert_close(single, result[1, 0])
    ones = FunctionModelOutput(lambda output, batch: output[:, 0]).out_to_loss_grad(result, batch)
    assert torch.equal(ones, torch.ones(5)) and not ones.requires_grad


def test_a_function_on_mappings_and_with_inputs_of_its_own():
    mapping = {"x": torch.randn(4, 3), "labels": torch.zeros(4, dtype=torch.long)}
    task = FunctionModelOutput(lambda output, batch: output.sum(-1) - batch["labels"])
    assert set(task.model_inputs(mapping)[1]) == {"x"}
    all_of_it = FunctionModelOutput(lambda output, batch: output, model_inputs_fn=lambda batch: ((), dict(batch)))
    assert set(all_of_it.model_inputs(mapping)[1]) == {"x", "labels"}
    with pytest.raises(ValueError, match="model_inputs_fn"):
        task.model_inputs((torch.zeros(3, 2),))
    for wrong in ({"output_fn": None}, {"output_fn": 1}, {"output_fn": print, "out_to_loss_fn": 1}):
        with pytest.raises(TypeError, match="Expected a function"):
            FunctionModelOutput(**wrong)


@pytest.mark.parametrize("reduce", [torch.Tensor.mean, lambda t: t, lambda t: 3.0, lambda t: t[:2, 0]])
def test_a_function_that_does_not_give_one_value_per_sample_is_refused(reduce):
    """A mean over the batch would make features depend on its size."""
    batch = (torch.randn(4, 3), torch.zeros(4))
    for task in (
        FunctionModelOutput(lambda output, batch: reduce(output)),
        FunctionModelOutput(lambda output, batch: output[:, 0], lambda output, batch: reduce(output)),
    ):
        with pytest.raises(ValueError, match=r"Expected a tensor of shape \(4,\)"):
            task.output(torch.randn(4, 3), batch)
            task.out_to_loss_grad(torch.randn(4, 3), batch)


def tiny_bert(**kwargs) -> torch.nn.Module:
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}
    return BertForSequenceClassification(BertConfig(vocab_size=10, **sizes, **kwargs))


def tiny_resnet() -> torch.nn.Module:
    config = ResNetConfig(embedding_size=4, hidden_sizes=[4], depths=[1], num_labels=3)
    return ResNetForImageClassification(config)


def test_infer_task_from_the_model():
    assert infer_task(tiny_bert(num_labels=3)) == "text_classification"
    assert infer_task(tiny_bert(num_labels=3, problem_type="single_label_classification")) == "text_classification"
    assert infer_task(tiny_resnet()) == "image_classification"
    assert issubclass(TASK_TO_MODELOUT["clip"], CLIPModelOutput)
    for name in ("CLIP", "CustomTextCLIP", "CLIPModel"):
        assert infer_task(type(name, (torch.nn.Module,), {})()) == "clip"
    assert infer_task(type("CLIPForImageClassification", (torch.nn.Module,), {})()) == "image_classification"


def test_infer_task_looks_inside_wrappers():
    import peft

    adapted = peft.get_peft_model(
        tiny_bert(num_labels=3), peft.LoraConfig(task_type="SEQ_CLS", target_modules=["query"], r=2)
    )
    assert infer_task(adapted) == "text_classification"
    assert infer_task(torch.compile(tiny_resnet())) == "image_classification"
    assert infer_task(torch.nn.DataParallel(tiny_resnet())) == "image_classification"


@pytest.mark.parametrize(
    "model",
    [
        torch.nn.Linear(2, 2),
        transformers.BertModel(tiny_bert().config),
        type(
            "BertForSequenceClassification", (torch.nn.Module,), {"config": SimpleNamespace(problem_type="ranking")}
        )(),
    ],
    ids=["not HF", "no head", "unknown problem"],
)
def test_infer_task_asks_where_it_cannot_know(model):
    with pytest.raises(ValueError, match=r"Pass `task=`.*image_classification"):
        infer_task(model)
