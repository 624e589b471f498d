"""Multi-label, regression, question answering and audio heads, and `loss` of any of them, against float64 autograd."""

import math

import pytest
import torch
import transformers as tf

from hf_trak.gradient_computers import make_gradient_computer
from hf_trak.modelout_functions import (
    CausalLMModelOutput,
    ClassificationModelOutput,
    CLIPModelOutput,
    FunctionModelOutput,
    LossModelOutput,
    MultiLabelClassificationModelOutput,
    QuestionAnsweringModelOutput,
    RegressionModelOutput,
    get_task,
    infer_task,
)

BERT = {
    "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 20, "vocab_size": 20,
    "max_position_embeddings": 16,
}  # fmt: skip


def audio_model():
    config = tf.Wav2Vec2Config(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=20, conv_dim=(8, 8),
        conv_stride=(4, 4), conv_kernel=(8, 8), num_feat_extract_layers=2, num_conv_pos_embeddings=8,
        num_conv_pos_embedding_groups=2, num_labels=4, classifier_proj_size=8,
    )  # fmt: skip
    return tf.Wav2Vec2ForSequenceClassification(config)


def text_batch(**labels: torch.Tensor) -> dict[str, torch.Tensor]:
    mask = torch.ones(3, 8, dtype=torch.long)
    mask[1, 5:] = 0
    return {"input_ids": torch.arange(24).reshape(3, 8) % 17 + 2, "attention_mask": mask, **labels}


def bert(head: str, **config) -> torch.nn.Module:
    return getattr(tf, f"BertFor{head}")(tf.BertConfig(**BERT, **config))


def multi_label_reference(out, batch, i):
    p = torch.sigmoid(out.logits[0])
    p = torch.where(batch["labels"][i] > 0, p, 1 - p)
    return torch.log(p / (1 - p)).sum(), (1 - p).mean()


def regression_reference(out, batch, i):
    return out.logits[0, 0], batch["labels"][i] - out.logits[0, 0]


def answer_reference(out, batch, i):
    """From the sequence without its padding."""
    total, wrong = 0, []
    for logits, place in ((out.start_logits, "start_positions"), (out.end_logits, "end_positions")):
        if batch[place][i] < 8:
            p = logits[0, batch["attention_mask"][i] == 1].softmax(-1)[batch[place][i]]
            total, wrong = total + torch.log(p / (1 - p)), [*wrong, 1 - p]
    return total, torch.stack(wrong).mean()


def class_reference(out, batch, i):
    p = out.logits[0].softmax(-1)[batch["labels"][i]]
    return torch.log(p / (1 - p)), 1 - p


CASES = {
    "multi_label_classification": (
        lambda: bert("SequenceClassification", num_labels=3, problem_type="multi_label_classification"),
        text_batch(labels=torch.tensor([[1.0, 0, 1], [0, 0, 0], [1, 1, 1]])),
        multi_label_reference,
    ),
    "regression": (
        lambda: bert("SequenceClassification", num_labels=1),
        text_batch(labels=torch.tensor([0.5, -2.0, 0.1])),
        regression_reference,
    ),
    "question_answering": (
        lambda: bert("QuestionAnswering"),
        text_batch(start_positions=torch.tensor([2, 0, 5]), end_positions=torch.tensor([3, 4, 8])),
        answer_reference,
    ),
    "audio_classification": (
        audio_model,
        {"input_values": torch.sin(torch.arange(3 * 400).reshape(3, 400) ** 1.1), "labels": torch.tensor([0, 3, 1])},
        class_reference,
    ),
}


@pytest.mark.few(6)
@pytest.mark.parametrize("engine", ["hooked", "iterative"])
@pytest.mark.parametrize("name", CASES)
def test_f_q_and_gradients_equal_float64_autograd_on_each_sample_alone(name, engine):
    build, batch, reference = CASES[name]
    torch.manual_seed(2)
    model, task = build().eval(), get_task(name)
    assert infer_task(model) == name
    task.bind(model)
    computer = make_gradient_computer(engine, model, task, device="cpu")
    whole = torch.zeros(3, computer.layout.total)

    def sink(start, block):
        whole[:, start : start + block.shape[1]] += block

    outputs = computer.stream(batch, sink)
    model.double()
    for i in range(3):
        inputs = {key: value[i : i + 1] for key, value in task.model_inputs(batch)[1].items()}
        inputs = {key: value.double() if value.is_floating_point() else value for key, value in inputs.items()}
        f, q = reference(model(**inputs), batch, i)
        assert float(outputs.output[i]) == pytest.approx(float(f.detach()), rel=1e-4, abs=1e-5)
        assert float(outputs.out_to_loss[i]) == pytest.approx(float(q.detach()), rel=1e-4, abs=1e-6)
        gradients = torch.autograd.grad(f, list(model.parameters()), allow_unused=True)
        pairs = zip(model.parameters(), gradients, strict=True)
        flat = torch.cat([(torch.zeros_like(p) if g is None else g).flatten() for p, g in pairs])
        assert float((whole[i].double() - flat).norm()) < 2e-4 * float(flat.norm())


def finite_difference(loss, f, h: float = 1e-5) -> torch.Tensor:
    """−dL/df along the change that the two functions have in common."""
    return -(loss(h) - loss(-h)) / (f(h) - f(-h))


def test_q_of_multi_label_is_minus_the_derivative_of_the_loss():
    torch.manual_seed(0)
    logits, labels = torch.randn(4, 5, dtype=torch.float64), torch.randint(0, 2, (4, 5)).double()
    sign, batch = 2 * labels - 1, {"labels": labels}
    for aggregation, total in (("sum", torch.Tensor.sum), ("mean", torch.Tensor.mean)):
        task = MultiLabelClassificationModelOutput(aggregation=aggregation)

        def loss(delta, total=total):
            each = torch.nn.functional.binary_cross_entropy_with_logits(
                logits + sign * delta, labels, reduction="none"
            )
            return total(each, 1)

        slope = finite_difference(loss, lambda delta, task=task: task.output(logits + sign * delta, batch))
        torch.testing.assert_close(task.out_to_loss_grad(logits, batch), slope, rtol=1e-7, atol=1e-9)
        torch.testing.assert_close(task.per_sample_loss(logits, batch), loss(0.0))


def test_q_of_regression_is_minus_the_derivative_of_the_loss():
    torch.manual_seed(0)
    predictions, labels = torch.randn(4, 1, dtype=torch.float64), torch.randn(4, dtype=torch.float64)
    task, batch = RegressionModelOutput(), {"labels": labels}

    def loss(delta):
        return 0.5 * (predictions[:, 0] + delta - labels).square()

    slope = finite_difference(loss, lambda delta: task.output(predictions + delta, batch))
    torch.testing.assert_close(task.out_to_loss_grad(predictions, batch), slope, rtol=1e-7, atol=1e-9)
    torch.testing.assert_close(task.per_sample_loss(predictions, batch), loss(0.0))
    fit = RegressionModelOutput(target="fit")
    torch.testing.assert_close(fit.output(predictions, batch, "target"), -loss(0.0))
    torch.testing.assert_close(fit.output(predictions, batch, "train"), predictions[:, 0])


def test_q_of_question_answering_is_minus_the_derivative_of_the_loss():
    torch.manual_seed(0)
    ends = torch.randn(2, 4, 6, dtype=torch.float64)
    places = torch.randint(0, 6, (2, 4))
    task = QuestionAnsweringModelOutput()
    batch = {"input_ids": torch.ones(4, 6), "start_positions": places[0], "end_positions": places[1]}

    def moved(delta):
        bumped = ends + torch.nn.functional.one_hot(places, 6) * delta
        return {"start_logits": bumped[0], "end_logits": bumped[1]}

    def loss(delta):
        out = moved(delta)
        return sum(
            torch.nn.functional.cross_entropy(out[f"{end}_logits"], places[i], reduction="none")
            for i, end in enumerate(("start", "end"))
        )

    slope = finite_difference(loss, lambda delta: task.output(moved(delta), batch))
    torch.testing.assert_close(task.out_to_loss_grad(moved(0.0), batch), slope, rtol=1e-7, atol=1e-9)
    torch.testing.assert_close(task.per_sample_loss(moved(0.0), batch), loss(0.0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sign", [1, -1])
def test_margins_are_finite_at_60(sign, dtype):
    """With p formed first, f would be infinite from margins of 17 (float32) or 6 (bfloat16)."""
    logits = torch.full((2, 3), 60.0 * sign, dtype=dtype)
    labels = {"labels": torch.ones(2, 3)}
    multi = get_task("multi_label_classification")
    torch.testing.assert_close(multi.output(logits, labels), torch.full((2,), 180.0 * sign))
    q = multi.out_to_loss_grad(logits, labels)
    torch.testing.assert_close(q, torch.full((2,), math.exp(-60) if sign == 1 else 1.0), rtol=1e-4, atol=0)
    ends = torch.zeros(2, 5, dtype=dtype)
    ends[:, 2] = 60 * sign
    batch = text_batch(start_positions=torch.tensor([2, 2]), end_positions=torch.tensor([2, 2]))
    batch = {**batch, "attention_mask": torch.tensor([[1, 1, 1, 1, 1], [0, 0, 1, 1, 1]])}
    out = {"start_logits": ends, "end_logits": ends}
    answer = get_task("question_answering")
    expected = torch.tensor([2 * (60.0 * sign - math.log(4)), 2 * (60.0 * sign - math.log(2))])
    torch.testing.assert_close(answer.output(out, batch), expected)
    assert bool((answer.out_to_loss_grad(out, batch) > 0).all())


def test_padding_is_no_answer():
    """Logits of padding must not change a sample's output, on either side."""
    torch.manual_seed(0)
    ends = torch.randn(2, 1, 4)
    alone = {"start_logits": ends[0], "end_logits": ends[1]}
    labels = {"start_positions": torch.tensor([1]), "end_positions": torch.tensor([3])}
    task = get_task("question_answering")
    expected = task.output(alone, {"input_ids": torch.ones(1, 4), **labels})
    for left, right in ((0, 3), (2, 0)):
        padded = torch.nn.functional.pad(ends, (left, right), value=5.0)
        batch = {
            "attention_mask": torch.nn.functional.pad(torch.ones(1, 4), (left, right)),
            **{name: place + left for name, place in labels.items()},
        }
        out = {"start_logits": padded[0], "end_logits": padded[1]}
        torch.testing.assert_close(task.output(out, batch), expected)


def test_a_class_of_a_multi_label_target():
    logits = torch.tensor([[2.0, -1.0, 0.5]])
    batch = {"labels": torch.tensor([[1, 0, -100]])}
    task = get_task("multi_label_classification")
    torch.testing.assert_close(task.output(logits, batch), torch.tensor([3.0]))
    only = {**batch, "target_mask": torch.tensor([[0, 1, 1]])}
    torch.testing.assert_close(task.output(logits, only, "target"), torch.tensor([1.0]))
    assert set(task.model_inputs({**text_batch(), **only})[1]) == {"input_ids", "attention_mask"}
    assert task.model_inputs((logits, batch["labels"]))[0] == (logits,)


# -- loss of any task ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*CASES, "causal_lm"])
def test_loss_takes_the_task_of_the_model(name):
    """Trained side −L, as the model's own loss has it on one sample; target side f; q ≡ 1."""
    if name == "causal_lm":
        config = tf.GPT2Config(vocab_size=20, n_embd=8, n_layer=1, n_head=1, bos_token_id=1, eos_token_id=1)
        model, batch = tf.GPT2LMHeadModel(config), text_batch()
        batch["labels"] = torch.where(batch["attention_mask"] == 1, batch["input_ids"], -100)
    else:
        build, batch, _ = CASES[name]
        model = build()
    model.eval()
    task, inner = get_task("loss"), get_task(name)
    task.bind(model)
    inner.bind(model)
    assert task.batch_columns == inner.batch_columns
    result = model(**task.model_inputs(batch)[1])
    torch.testing.assert_close(task.output(result, batch, "target"), inner.output(result, batch, "target"))
    q = task.out_to_loss_grad(result, batch)
    assert torch.equal(q, torch.ones(3))
    losses = -task.output(result, batch, "train").detach()

    def counted(i: int) -> int:
        return int((batch["labels"][i, 1:] != -100).sum()) if name == "causal_lm" else 0

    for i in range(3):
        single = {key: value[i : i + 1] for key, value in batch.items()}
        own = float(model(**single).loss.detach())
        scale = {  # the models' own loss is a mean over labels (and the square of the error, not half of it)
            "multi_label_classification": 3, "regression": 0.5, "audio_classification": 1, "question_answering": 2,
            "causal_lm": counted(i),
        }[name]  # fmt: skip
        if name == "question_answering" and i > 0:
            continue  # with padding, or with an end outside, the model's own mean is another one
        assert float(losses[i]) == pytest.approx(scale * own, rel=1e-4)


def test_loss_of_a_given_task():
    given = LossModelOutput(of=CausalLMModelOutput(aggregation="mean"))
    assert '"aggregation": "mean"' in given.of and LossModelOutput().of is None
    given.bind(bert("SequenceClassification"))  # what was given stays
    assert isinstance(given._task, CausalLMModelOutput)
    unknown = LossModelOutput()
    unknown.bind(torch.nn.Linear(2, 2))
    assert isinstance(unknown._task, ClassificationModelOutput)
    for wrong in (CLIPModelOutput(), FunctionModelOutput(lambda out, batch: out)):
        with pytest.raises(TypeError, match=r"no loss per sample.*reduction='none'"):
            LossModelOutput(of=wrong)


# -- bad input -------------------------------------------------------------------------------------------------------


def test_missing_and_wrong_labels_are_named():
    logits = torch.zeros(2, 3)
    for name in ("multi_label_classification", "regression"):
        with pytest.raises(ValueError, match=r"keys \['x'\], of which none hold labels"):
            get_task(name).out_to_loss_grad(logits[:, :1], {"x": logits})
    multi = get_task("multi_label_classification")
    with pytest.raises(ValueError, match=r"labels have the shape \(2, 2\), the logits \(2, 3\)"):
        multi.output(logits, {"labels": torch.zeros(2, 2)})
    with pytest.raises(ValueError, match=r"shape \(2,\).*'text_classification'"):
        multi.output(logits, {"labels": torch.zeros(2)})
    with pytest.raises(ValueError, match=r"Class 1 of sample 0 has the label 0.5. Expected 0 or 1"):
        multi.out_to_loss_grad(logits, {"labels": torch.tensor([[0, 0.5, 1], [0, 0, 0]])})
    regression = get_task("regression")
    with pytest.raises(ValueError, match=r"shape \(3,\) for 2 sample"):
        regression.out_to_loss_grad(logits[:, :1], {"labels": torch.zeros(3)})
    with pytest.raises(ValueError, match="label of sample 1 or its prediction is not finite"):
        regression.out_to_loss_grad(logits[:, :1], {"labels": torch.tensor([0.0, math.nan])})
    with pytest.raises(ValueError, match="`target` is 'both'"):
        RegressionModelOutput(target="both")


def test_missing_and_wrong_positions_are_named():
    task = get_task("question_answering")
    out = {"start_logits": torch.zeros(1, 4), "end_logits": torch.zeros(1, 4)}
    inputs = {"input_ids": torch.ones(1, 4), "attention_mask": torch.tensor([[1, 1, 1, 0]])}
    place = torch.tensor([1])
    with pytest.raises(ValueError, match=r"not \['end_positions'\]"):
        task.output(out, {**inputs, "start_positions": place})
    for wrong, reason in ((-1, "negative"), (3, "padding")):
        labels = {"start_positions": place, "end_positions": torch.tensor([wrong])}
        with pytest.raises(ValueError, match=rf"`end_positions` of sample 0 is {wrong}, which is {reason}"):
            task.out_to_loss_grad(out, {**inputs, **labels})
    gone = {**inputs, "start_positions": torch.tensor([9]), "end_positions": torch.tensor([9])}
    assert task.out_to_loss_grad(out, gone).tolist() == [0.0]
    with pytest.raises(ValueError, match="Sample 0 of 1 targets has no label"):
        task.out_to_loss_grad(out, gone, "target")
    with pytest.raises(TypeError, match="Expected a mapping"):
        task.model_inputs((torch.zeros(1),))


@pytest.mark.parametrize(
    ("name", "labels", "remedy"),
    [
        ("multi_label_classification", {"labels": torch.zeros(3, 2)}, "classification head"),
        ("regression", {"labels": torch.zeros(3)}, "num_labels=1"),
        (
            "question_answering",
            {"start_positions": torch.tensor([1, 1, 1]), "end_positions": torch.tensor([2, 2, 2])},
            "AutoModelForQuestionAnswering",
        ),
    ],
)
def test_a_model_without_the_head_is_refused(name, labels, remedy):
    model, task, batch = bert("TokenClassification", num_labels=7).eval(), get_task(name), text_batch(**labels)
    with pytest.raises(ValueError, match=remedy):
        task.output(model(**task.model_inputs(batch)[1]), batch)
    bare = tf.BertModel(model.config).eval()
    with pytest.raises(ValueError, match=rf"last_hidden_state.*{remedy}"):
        task.output(bare(**task.model_inputs(batch)[1]), batch)
