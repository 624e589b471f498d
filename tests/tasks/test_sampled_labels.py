"""Labels drawn from the model: their distribution, the Fisher information, and what a draw may depend on."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as tf
from torch import Tensor

from hf_trak.gradient_computers import make_gradient_computer
from hf_trak.gradient_computers.base import SplitBatch
from hf_trak.modelout_functions import (
    BatchedModelOutput,
    CLIPModelOutput,
    FunctionModelOutput,
    ImageClassificationModelOutput,
    LossModelOutput,
    get_task,
)
from hf_trak.modelout_functions.classification import MultiLabelClassificationModelOutput, RegressionModelOutput
from hf_trak.modelout_functions.draws import GROUP_BLOCK, Draws
from hf_trak.modelout_functions.question_answering import QuestionAnsweringModelOutput
from hf_trak.modelout_functions.sampled import ROW_COLUMN, SampledLikelihood, with_rows
from hf_trak.modelout_functions.token_tasks import CausalLMModelOutput
from hf_trak.projectors import reference

VOCAB = 300  # more than one group of classes
SMALL = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 20}
BERT = {**SMALL, "vocab_size": VOCAB, "max_position_embeddings": 32, "pad_token_id": 0}
GPT2 = {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 32, "bos_token_id": 1, "eos_token_id": 1}
T5 = {"d_model": 16, "d_kv": 8, "d_ff": 20, "num_layers": 1, "num_heads": 2, "decoder_start_token_id": 0}
VIT = {**SMALL, "image_size": 8, "patch_size": 4, "num_labels": 5}

MODELS: dict[str, Callable[[], Any]] = {
    "causal_lm": lambda: tf.GPT2LMHeadModel(tf.GPT2Config(vocab_size=VOCAB, **GPT2)),
    "masked_lm": lambda: tf.BertForMaskedLM(tf.BertConfig(**BERT)),
    "token_classification": lambda: tf.BertForTokenClassification(tf.BertConfig(num_labels=5, **BERT)),
    "seq2seq_lm": lambda: tf.T5ForConditionalGeneration(tf.T5Config(vocab_size=VOCAB, **T5)),
    "question_answering": lambda: tf.BertForQuestionAnswering(tf.BertConfig(**BERT)),
    "text_classification": lambda: tf.BertForSequenceClassification(tf.BertConfig(num_labels=5, **BERT)),
    "multi_label_classification": lambda: tf.BertForSequenceClassification(tf.BertConfig(num_labels=5, **BERT)),
    "regression": lambda: tf.BertForSequenceClassification(tf.BertConfig(num_labels=1, **BERT)),
    "image_classification": lambda: tf.ViTForImageClassification(tf.ViTConfig(**VIT)),
}
LENGTHS = (7, 4, 9)
ROWS = (12, 3, 2**33 + 5)


def model_for(name: str) -> Any:
    torch.manual_seed(5)
    model = MODELS[name]().eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():  # predictions that are far from even
            parameter += 0.3 * torch.randn(parameter.shape, generator=generator)
    return model


def samples(name: str) -> list[dict[str, Tensor]]:
    """Three rows of different lengths, not padded; about a third of the labels is -100."""
    generator = torch.Generator().manual_seed(3)
    rows = []
    for index, length in enumerate(LENGTHS):
        ids = torch.randint(3, VOCAB, (length,), generator=generator)
        row = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        if name in ("causal_lm", "masked_lm", "seq2seq_lm", "token_classification"):
            row["labels"] = ids % 5 if name == "token_classification" else ids.clone()
            row["labels"][torch.rand(length, generator=generator) < 0.3] = -100
            row["labels"][length // 2] = 1
        elif name == "question_answering":
            row |= {"start_positions": torch.tensor(1), "end_positions": torch.tensor(2 if index else 99)}
        elif name == "multi_label_classification":
            row["labels"] = torch.tensor([1.0, 0.0, -100.0, 1.0, 0.0])
        else:
            row["labels"] = torch.tensor(0.3 * index) if name == "regression" else torch.tensor(index)
        if name == "image_classification":
            row = {"pixel_values": torch.randn(3, 8, 8, generator=generator), "labels": row["labels"]}
        rows.append(row)
    return rows


def collated(rows: list[dict[str, Tensor]], side: str = "right", width: int = 0) -> dict[str, Tensor]:
    """A batch, padded as a tokenizer and its collator would."""
    longest = max([width, *(len(row["input_ids"]) for row in rows if "input_ids" in row)])

    def padded(name: str, values: Tensor) -> Tensor:
        if values.ndim != 1 or (name == "labels" and values.is_floating_point()):
            return values
        missing = longest - len(values)
        return torch.nn.functional.pad(
            values, (missing, 0) if side == "left" else (0, missing), value=-100 if name == "labels" else 0
        )

    return {name: torch.stack([padded(name, row[name]) for row in rows]) for name in rows[0]}


def sampled_values(task: SampledLikelihood, model: Any, batch: Any) -> Tensor:
    args, inputs = task.model_inputs(batch)
    with torch.no_grad():
        return task.output(model(*args, **inputs), batch)


class Chosen(Draws):
    """Draws that are chosen by hand: a label for every place."""

    def __init__(self, labels: Tensor) -> None:
        super().__init__(0, torch.zeros(len(labels), dtype=torch.int64))
        self.labels = labels

    def classes(self, logits: Tensor, labelled: Tensor) -> Tensor:
        return self.labels

    def uniforms(self, labelled: Tensor) -> Tensor:
        return torch.where(self.labels > 0, 1e-9, 1 - 1e-9).double()


def test_numbers_are_those_of_the_generator():
    rows, labelled = torch.tensor([5, 2**40 + 1]), torch.tensor([[True, False, True], [False, True, True]])
    seed = 2**62 + 2**33 + 5
    uniforms = Draws(seed, rows).uniforms(labelled)
    for (i, t), place in {(0, 0): 0, (0, 2): 1, (1, 1): 0, (1, 2): 1}.items():
        word = reference.philox(int(rows[i]), 0, 6, seed, place)[0]
        assert uniforms[i, t] == (word + 0.5) / 2**32


def test_no_two_numbers_share_bits():
    """Those of rows, places, classes and groups are all different."""
    draws = Draws(1, torch.arange(20))
    places = torch.arange(10).expand(20, 10)
    numbers = torch.cat([draws._numbers(places, block, n).flatten() for block, n in ((0, 1), (1, 256), (65, 40))])
    # 59,400 numbers out of 2³²: 0.41 equal pairs are expected, 6 or more happen once in a million times
    assert numbers.numel() - numbers.unique().numel() < 6
    assert GROUP_BLOCK == 65
    assert numbers.min() > 0 and numbers.max() < 1


@pytest.mark.few(2)
@pytest.mark.parametrize("classes", [5, 256, 700])
def test_frequencies_are_those_of_the_softmax(classes):
    """χ² of the counts, with a chance of one in a million to be that large."""
    n = 15_000
    logits = torch.randn(classes, generator=torch.Generator().manual_seed(classes))
    drawn = Draws(0, torch.arange(3)).classes(logits.expand(3, n // 3, classes), torch.ones(3, n // 3).bool())
    expected = n * logits.double().softmax(0)
    common = expected >= 5
    counts = drawn.flatten().bincount(minlength=classes).double()
    pooled = [torch.cat([x[common], x[~common].sum()[None]]) for x in (counts, expected)]
    pooled = [x[pooled[1] > 0] for x in pooled]
    freedom = len(pooled[0]) - 1
    bound = freedom + 2 * (freedom * 13.9) ** 0.5 + 2 * 13.9  # Laurent and Massart 2000, Lemma 1, e^−13.9 = 1e-6
    assert ((pooled[0] - pooled[1]) ** 2 / pooled[1]).sum() < bound


def test_uniforms_are_uniform_and_independent_between_places_and_rows():
    n = 10_000
    uniforms = Draws(3, torch.arange(n)).uniforms(torch.ones(n, 2).bool())
    for values in (*uniforms.T, uniforms.flatten()):
        sizes = values.sort().values - (torch.arange(len(values)) + 0.5) / len(values)
        assert sizes.abs().max() < 2.7 / len(values) ** 0.5  # Dvoretzky, Kiefer, Wolfowitz: 2 e^(−2·2.7²) = 1e-6
    centred = uniforms - 0.5
    for left, right in ((centred[:, 0], centred[:, 1]), (centred[:-1, 0], centred[1:, 0])):
        assert abs(float((left * right).mean())) < 5 / 12 / len(left) ** 0.5  # five standard deviations


def test_rounding_hardly_ever_changes_a_label():
    """The inverse of the cumulative distribution would change about one in twenty here."""
    generator = torch.Generator().manual_seed(0)
    logits = 2.6 * torch.randn(1, 250, 50_257, generator=generator)
    rounded = logits + 1e-4 * torch.randn(logits.shape, generator=generator)
    labelled, draws = torch.ones(1, 250).bool(), Draws(0, torch.tensor([7]))
    assert (draws.classes(logits, labelled) != draws.classes(rounded, labelled)).sum() <= 1


def test_slices_change_nothing(monkeypatch):
    logits = torch.randn(3, 11, 600, generator=torch.Generator().manual_seed(0))
    labelled, draws = torch.ones(3, 11).bool(), Draws(4, torch.arange(3))
    whole = draws.classes(logits, labelled)
    monkeypatch.setattr("hf_trak.modelout_functions.draws._SLICE", 4000)
    assert torch.equal(draws.classes(logits, labelled), whole)
    assert draws.classes(logits[:, :0], labelled[:, :0]).shape == (3, 0)


def expected_fisher(p: Tensor, weights: Tensor) -> Tensor:
    """Σ_t w_t (diag p_t − p_t p_tᵀ) as a block diagonal matrix, of probabilities `(T, C)`."""
    return torch.block_diag(*[w * (row.diag() - row[:, None] * row) for w, row in zip(weights, p, strict=True)])


def enumerated_fisher(task: Any, logits: Tensor, batch: Any, p: Tensor, fields: Callable[[Tensor], Any]) -> Tensor:
    """Σ_ŷ p(ŷ) g gᵀ over all combinations of labels ŷ, for the gradient g with respect to the logits."""
    places, classes = p.shape
    total = torch.zeros(logits.numel(), logits.numel(), dtype=torch.float64)
    for labels in itertools.product(range(classes), repeat=places):
        leaf = logits.clone().requires_grad_()
        value = task.sampled_log_likelihood(fields(leaf), batch, Chosen(torch.tensor([labels])))
        gradient = torch.autograd.grad(value.sum(), leaf)[0].flatten()
        chance = torch.stack([p[t, label] for t, label in enumerate(labels)]).prod()
        total += chance * gradient[:, None] * gradient
    return total


def logits_of(places: int, classes: int) -> Tensor:
    return torch.randn(1, places, classes, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


def test_classification_has_the_fisher_information_of_a_softmax_regression():
    logits = logits_of(1, 4)[0]
    found = enumerated_fisher(
        ImageClassificationModelOutput(),
        logits,
        (torch.zeros(1, 2), torch.tensor([3])),
        logits.softmax(-1),
        lambda z: z,
    )
    torch.testing.assert_close(found, expected_fisher(logits.softmax(-1), torch.ones(1)))


@pytest.mark.parametrize("aggregation", ["sum", "mean"])
def test_tokens_have_the_fisher_information_of_their_loss(aggregation):
    """The first token has no prediction, and the last but one no label."""
    logits, ids = logits_of(4, 3), torch.tensor([[0, 1, 2, 0]])
    batch = {"input_ids": ids, "labels": torch.tensor([[0, 1, -100, 0]])}
    p = logits[0].softmax(-1)
    # the label at position 1 is predicted at 0, the one at 3 at 2: w = 1, or 1/2 for the mean
    weights = torch.tensor([1.0, 0.0, 1.0, 0.0]).double() / (1 if aggregation == "sum" else 2)
    found = enumerated_fisher(CausalLMModelOutput(aggregation), logits, batch, p[:3], lambda z: {"logits": z})
    torch.testing.assert_close(found, expected_fisher(p, weights))


def test_label_weights_enter_by_their_roots():
    logits, batch = logits_of(2, 3), {"labels": torch.tensor([[1, 2]]), "target_weights": torch.tensor([[4.0, 0.25]])}
    p = logits[0].softmax(-1)
    found = enumerated_fisher(get_task("masked_lm"), logits, batch, p, lambda z: {"logits": z})
    torch.testing.assert_close(found, expected_fisher(p, batch["target_weights"][0].double()))


def test_question_answering_has_the_fisher_information_of_both_ends():
    logits = logits_of(2, 3)
    batch = {"attention_mask": torch.ones(1, 3), **{f"{end}_positions": torch.tensor([1]) for end in ("start", "end")}}
    p = logits[0].softmax(-1)
    task = QuestionAnsweringModelOutput("mean")
    found = enumerated_fisher(task, logits, batch, p, lambda z: {"start_logits": z[:, 0], "end_logits": z[:, 1]})
    torch.testing.assert_close(found, expected_fisher(p, torch.tensor([0.5, 0.5])))


def test_multi_label_classification_has_the_fisher_information_of_every_class():
    logits, batch = logits_of(1, 3)[0], {"labels": torch.tensor([[1, -100, 0]])}
    yes = logits[0].sigmoid()
    found = enumerated_fisher(
        MultiLabelClassificationModelOutput(),
        logits,
        batch,
        torch.stack([1 - yes, yes], dim=1),
        lambda z: {"logits": z},
    )
    torch.testing.assert_close(found, (yes * (1 - yes) * torch.tensor([1, 0, 1])).diag())


def test_multi_label_answers_have_the_frequency_of_the_sigmoid():
    n, logits = 10_000, torch.tensor([-2.0, 0.0, 1.0])
    task = SampledLikelihood(MultiLabelClassificationModelOutput(), 0)
    batch = with_rows({"labels": torch.ones(n, 3)}, range(n))
    leaf = logits.expand(n, 3).clone().requires_grad_()
    gradient = torch.autograd.grad(task.output({"logits": leaf}, batch).sum(), leaf)[0]
    found = (gradient > 0).double().mean(dim=0)  # the gradient is 1 − p for a yes and −p for a no
    assert ((found - logits.sigmoid()).abs() < 5 * 0.5 / n**0.5).all()


def test_regression_gives_the_prediction_with_either_sign():
    task = SampledLikelihood(RegressionModelOutput(), 0)
    predictions, n = torch.linspace(0.5, 1.5, 2000), 2000
    ratios = task.output(predictions, with_rows((torch.zeros(n, 1), torch.zeros(n)), range(n))) / predictions
    assert set(ratios.tolist()) == {-1.0, 1.0}
    assert abs(ratios.mean()) < 5 / n**0.5


def test_draws_average_to_the_fisher_information():
    """The second moment over many rows with the real draws, within five standard deviations."""
    n = 20_000
    logits = torch.tensor([1.0, -0.5, 0.2])
    leaf = logits.expand(n, 3).double().clone().requires_grad_()
    task = SampledLikelihood(ImageClassificationModelOutput(), 1)
    batch = with_rows((torch.zeros(n, 1), torch.zeros(n, dtype=torch.long)), range(n))
    g = torch.autograd.grad(task.output(leaf, batch).sum(), leaf)[0]
    products = g[:, :, None] * g[:, None]
    expected = expected_fisher(logits.double().softmax(0)[None], torch.ones(1))
    assert ((products.mean(dim=0) - expected).abs() <= 5 * products.std(dim=0) / n**0.5 + 1e-12).all()


TEXT = [name for name in MODELS if name != "image_classification"]


@pytest.mark.parametrize("name", TEXT)
def test_draws_do_not_depend_on_batch_padding_or_order(name):
    """A label that changes would change f of its row in the first digit."""
    model, rows = model_for(name), samples(name)
    task = SampledLikelihood(get_task(name), 11)
    task.bind(model)
    whole = sampled_values(task, model, with_rows(collated(rows), ROWS))
    assert len(set(whole.tolist())) == 3

    def same(batch: dict[str, Tensor], order: list[int]) -> None:
        found = sampled_values(task, model, with_rows(batch, [ROWS[i] for i in order]))
        torch.testing.assert_close(found, whole[order], rtol=1e-4, atol=1e-4)

    same(collated(rows, width=14), [0, 1, 2])
    same(collated(rows[::-1]), [2, 1, 0])
    for i, row in enumerate(rows):
        same(collated([row]), [i])
    if name in ("causal_lm", "seq2seq_lm"):  # others number positions from the left edge
        same(collated(rows, "left"), [0, 1, 2])
        same(collated(rows, "left", 13), [0, 1, 2])
    split = SplitBatch.of(with_rows(collated(rows), ROWS))
    torch.testing.assert_close(sampled_values(task, model, split.rows(1, 3)), whole[1:], rtol=1e-4, atol=1e-4)


def test_ends_of_answers_do_not_depend_on_padding():
    task, logits = SampledLikelihood(QuestionAnsweringModelOutput(), 0), torch.randn(20, 2, 9)

    def values(before: int, behind: int) -> Tensor:
        pad = lambda x, value: torch.nn.functional.pad(x, (before, behind), value=value)  # noqa: E731
        ends = {f"{end}_positions": torch.full((20,), before + 3) for end in ("start", "end")}
        batch = {"attention_mask": pad(torch.ones(20, 9), 0), **ends}
        start, end = pad(logits, 7.0).unbind(1)
        return task.output({"start_logits": start, "end_logits": end}, with_rows(batch, range(20)))

    for before, behind in ((4, 0), (0, 5), (300, 2)):
        torch.testing.assert_close(values(before, behind), values(0, 0))


def test_other_seeds_rows_and_places_give_other_labels():
    logits, labelled = torch.zeros(2, 50, 1000), torch.ones(2, 50).bool()
    first = Draws(0, torch.tensor([1, 2])).classes(logits, labelled)
    different = [
        Draws(1, torch.tensor([1, 2])).classes(logits, labelled),
        Draws(0, torch.tensor([3, 4])).classes(logits, labelled),
        Draws(0, torch.tensor([1 + 2**32, 2 + 2**32])).classes(logits, labelled),
        Draws(0, torch.tensor([1, 2]), second=True).classes(logits, labelled),
        first.roll(1, dims=1),
        first.flip(0),
    ]
    assert all((other == first).double().mean() < 0.05 for other in different)  # 100 draws, .001 are equal by chance


def test_unlabelled_places_do_not_shift_the_draws():
    logits = torch.randn(1, 6, 400, generator=torch.Generator().manual_seed(0))
    labelled = torch.tensor([[True, False, False, True, True, False]])
    draws = Draws(0, torch.tensor([9]))
    among = draws.classes(logits, labelled)[labelled]
    assert torch.equal(among, draws.classes(logits[labelled][None], torch.ones(1, 3).bool())[0])


def test_target_mask_takes_labels_out():
    model, rows = model_for("causal_lm"), samples("causal_lm")
    task = SampledLikelihood(get_task("causal_lm"), 0)
    task.bind(model)
    batch = collated(rows)
    mask = torch.zeros_like(batch["labels"])
    mask[:, 3:] = 1
    masked = {**batch, "target_mask": mask}
    without = {**batch, "labels": batch["labels"].masked_fill(mask == 0, -100)}
    torch.testing.assert_close(
        sampled_values(task, model, with_rows(masked, ROWS)), sampled_values(task, model, with_rows(without, ROWS))
    )


def drawn_by_hand(name: str, result: Any, row: dict[str, Tensor], draws: Draws) -> Tensor:
    """log p(ŷ) of one sample alone, from `log_softmax` at its labelled places."""
    if name == "regression":
        return result.logits.sum() * (1 if draws.uniforms(torch.ones(1, 1).bool()) >= 0.5 else -1)
    if name == "multi_label_classification":
        p, valid = result.logits.sigmoid(), row["labels"][None] != -100
        drawn = draws.uniforms(valid) < p.detach()
        return torch.where(drawn, p, 1 - p).log()[valid].sum()
    if name == "question_answering":
        logits = torch.stack([result.start_logits, result.end_logits], dim=1)
        logits = logits if row["end_positions"] < 10 else logits[:, :1]
    elif name in ("text_classification", "image_classification"):
        logits = result.logits[:, None]
    else:
        shift = name == "causal_lm"
        logits, labels = (result.logits[0, :-1], row["labels"][1:]) if shift else (result.logits[0], row["labels"])
        logits = logits[labels != -100][None]
    drawn = draws.classes(logits, torch.ones(logits.shape[:2]).bool())
    return logits.log_softmax(-1).gather(-1, drawn[..., None]).sum()


@pytest.mark.few(4)
@pytest.mark.parametrize("engine", ["hooked", "functional"])
@pytest.mark.parametrize("name", MODELS)
def test_engines_give_the_gradients_of_plain_autograd(name, engine):
    model, rows = model_for(name), samples(name)
    task = SampledLikelihood(LossModelOutput(get_task(name)), 3)
    task.bind(model)
    computer = make_gradient_computer(engine, model, task, device="cpu")
    parameters = list(model.parameters())
    found = torch.zeros(3, sum(p.numel() for p in parameters))

    def sink(start: int, block: Tensor) -> None:
        found[:, start : start + block.shape[1]] += block

    batch = with_rows(collated(rows), ROWS)
    outputs = computer.stream(batch, sink)
    assert torch.equal(outputs.out_to_loss, torch.ones(3))
    for i, (row, number) in enumerate(zip(rows, ROWS, strict=True)):
        inputs = {k: v[None] for k, v in row.items() if k in ("input_ids", "attention_mask", "pixel_values")}
        if name == "seq2seq_lm":
            inputs["labels"] = row["labels"][None]
        value = drawn_by_hand(name, model(**inputs), row, Draws(3, torch.tensor([number])))
        gradients = torch.autograd.grad(value, parameters, allow_unused=True, materialize_grads=True)
        expected = torch.cat([g.flatten() for g in gradients])
        assert expected.norm() > 0
        torch.testing.assert_close(outputs.output[i], value.detach(), rtol=1e-4, atol=1e-4)
        assert (found[i] - expected).norm() < 1e-4 * expected.norm()


def test_half_precision_logits_are_widened():
    logits, labelled = torch.randn(2, 3, 10).bfloat16(), torch.ones(2, 3).bool()
    draws = Draws(0, torch.arange(2))
    assert torch.equal(draws.classes(logits, labelled), draws.classes(logits.float(), labelled))
    assert draws.log_likelihoods(logits, labelled).dtype == torch.float32


def test_gradients_are_precise_where_the_model_is_certain():
    """1 − p = 4.2e-18: in float32, 1 − p would be 0, and −log_softmax as well."""
    logits = torch.tensor([[[40.0, 0.0]]], requires_grad=True)
    value = Draws(0, torch.tensor([0])).log_likelihoods(logits, torch.ones(1, 1).bool())
    gradient = torch.autograd.grad(value.sum(), logits)[0].flatten()
    torch.testing.assert_close(gradient, torch.tensor([1.0, -1.0]) * 4.248354255e-18, rtol=1e-4, atol=0)


def test_targets_are_those_of_the_inner_task():
    task, batch = ImageClassificationModelOutput(), (torch.zeros(2, 1), torch.tensor([0, 2]))
    sampled, logits = SampledLikelihood(task, 0), torch.randn(2, 3)
    numbered = with_rows(batch, [5, 6])
    assert torch.equal(sampled.output(logits, numbered, "target"), task.output(logits, batch, "target"))
    assert torch.equal(sampled.model_inputs(numbered)[0][0], batch[0])


def test_the_task_of_a_model_is_found_when_it_is_bound():
    task, model = SampledLikelihood(LossModelOutput(), 0), model_for("causal_lm")
    task.bind(model)
    batch = with_rows(collated(samples("causal_lm")), ROWS)
    plain = SampledLikelihood(get_task("causal_lm"), 0)
    plain.bind(model)
    assert torch.equal(sampled_values(task, model, batch), sampled_values(plain, model, batch))


def test_the_inner_task_is_told_everything():
    class Recorder(ImageClassificationModelOutput):
        batch_columns = ("extra",)

        def __init__(self) -> None:
            super().__init__()
            self.told: list[str] = []

        def __getattribute__(self, name: str) -> Any:
            if name in ("collator", "bind", "use_seed", "reference_rows", "prepare", "references", "restore"):
                self.told.append(name)
            return super().__getattribute__(name)

    inner, model = Recorder(), torch.nn.Linear(1, 2)
    task = SampledLikelihood(inner, 0)
    assert task.batch_columns == ("extra",)
    assert task.collator(list) is list
    assert list(task.reference_rows(5)) == [] and task.references() == {}
    task.bind(model)
    task.use_seed(4)
    task.prepare(model, [])
    task.restore(model, {})
    assert sorted(inner.told) == [
        "bind", "collator", "prepare", "reference_rows", "references", "restore", "use_seed",
    ]  # fmt: skip
    assert task.seed == 0


def test_row_numbers_join_a_batch():
    mapping = tf.BatchEncoding({"input_ids": torch.zeros(2, 3)})
    numbered = with_rows(mapping, [4, 2**40])
    assert numbered[ROW_COLUMN].tolist() == [4, 2**40] and ROW_COLUMN not in mapping
    sequence = with_rows([torch.zeros(2), torch.ones(2)], range(2))
    assert len(sequence) == 3 and sequence[-1].dtype == torch.int64
    assert SplitBatch.of(sequence).rows(1, 2)[-1].tolist() == [1]
    meta = with_rows({"flag": True, "x": torch.zeros(2, device="meta")}, [0, 1])
    assert meta[ROW_COLUMN].device.type == "meta"


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: with_rows({"x": torch.zeros(2)}, [1]), ValueError, "2 sample.s., but 1 row"),
        (lambda: with_rows({"x": 3}, [1]), ValueError, "no tensor"),
        (lambda: with_rows({"x": torch.zeros(1), ROW_COLUMN: 1}, [0]), ValueError, "of its own"),
        (lambda: SampledLikelihood(CLIPModelOutput(), 0), TypeError, "CLIPModelOutput.*empirical"),
        (lambda: SampledLikelihood(FunctionModelOutput(max), 0), TypeError, "FunctionModelOutput.*sampled_log_lik"),
        (lambda: SampledLikelihood(ImageClassificationModelOutput(), -1), ValueError, "`seed` is -1"),
        (lambda: Draws(2**63, torch.zeros(1)), ValueError, "`seed` is 9223372036854775808"),
    ],
)
def test_errors(call, error, text):
    with pytest.raises(error, match=text):
        call()


@pytest.mark.parametrize("batch", [{"x": torch.zeros(2, 1)}, (torch.zeros(2, 1), torch.tensor([0.5, 1.0])), ()])
def test_batches_without_row_numbers_are_refused(batch):
    with pytest.raises(ValueError, match="no row numbers"):
        SampledLikelihood(ImageClassificationModelOutput(), 0).model_inputs(batch)


def test_labels_of_the_data_are_still_checked():
    classes = with_rows((torch.zeros(2, 1), torch.tensor([0, 7])), [0, 1])
    with pytest.raises(ValueError, match="label 7"):
        SampledLikelihood(ImageClassificationModelOutput(), 0).out_to_loss_grad(torch.zeros(2, 3), classes)
    tokens = with_rows({"labels": torch.tensor([[0, 9]])}, [0])
    with pytest.raises(ValueError, match="label 9"):
        SampledLikelihood(get_task("masked_lm"), 0).out_to_loss_grad(torch.zeros(1, 2, 3), tokens)


def test_negative_weights_are_refused():
    batch = with_rows({"labels": torch.tensor([[0, 1]]), "target_weights": torch.tensor([[1.0, -0.5]])}, [0])
    with pytest.raises(ValueError, match=r"Label 1 of sample 0 has the weight -0\.5"):
        SampledLikelihood(get_task("masked_lm"), 0).out_to_loss_grad(torch.zeros(1, 2, 3), batch)


def test_a_task_of_a_user_can_draw_its_labels():
    class Ours(BatchedModelOutput):
        def model_inputs(self, batch):
            return (batch[0],), {}

        def output(self, model_output, batch, side="train"):
            return model_output[:, 0]

        def out_to_loss_grad(self, model_output, batch, side="train"):
            return 2 * torch.ones(len(model_output))

        def sampled_log_likelihood(self, model_output, batch, draws):
            labelled = torch.ones(len(model_output), 1).bool()
            return draws.log_likelihoods(model_output[:, None], labelled)[:, 0]

    task, batch = SampledLikelihood(Ours(), 0), with_rows((torch.zeros(4, 1), torch.zeros(4)), range(4))
    assert (task.output(torch.zeros(4, 2), batch) == torch.tensor(0.5).log()).all()
    assert task.out_to_loss_grad(torch.zeros(4, 2), batch).tolist() == [1.0] * 4
