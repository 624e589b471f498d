"""Tasks with labels per token: against float64 autograd on every sample alone, padded on either side, in any batch."""

import math

import pytest
import torch
import transformers as tf
from transformers import DataCollatorWithPadding

from hf_trak.gradient_computers import make_gradient_computer
from hf_trak.modelout_functions import get_task
from hf_trak.modelout_functions.token_tasks import TokenColumnsCollator

VOCAB = 24
LENGTHS = (7, 4, 9)
SMALL = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 20}
DECODER = {**SMALL, "vocab_size": VOCAB, "max_position_embeddings": 32, "pad_token_id": 0}
GPT2 = {
    "bos_token_id": 1,
    "eos_token_id": 1,
    "n_embd": 16,
    "n_layer": 2,
    "n_head": 2,
    "vocab_size": VOCAB,
    "n_positions": 32,
}
T5 = {"d_model": 16, "d_kv": 8, "d_ff": 20, "num_layers": 1, "num_heads": 2, "vocab_size": VOCAB}
BART = {
    "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "vocab_size": VOCAB,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 20, "decoder_ffn_dim": 20, "max_position_embeddings": 32,
}  # fmt: skip

CAUSAL = {
    "gpt2": lambda: tf.GPT2LMHeadModel(tf.GPT2Config(**GPT2)),
    "llama": lambda: tf.LlamaForCausalLM(tf.LlamaConfig(num_key_value_heads=1, **DECODER)),
    "opt": lambda: tf.OPTForCausalLM(
        tf.OPTConfig(
            hidden_size=16, num_hidden_layers=1, num_attention_heads=2, ffn_dim=20, vocab_size=VOCAB, pad_token_id=0,
            max_position_embeddings=32, word_embed_proj_dim=16,
        )
    ),
    "neox": lambda: tf.GPTNeoXForCausalLM(tf.GPTNeoXConfig(**DECODER)),
}  # fmt: skip
BESIDE = {
    "bert": ("masked_lm", lambda: tf.BertForMaskedLM(tf.BertConfig(**DECODER))),
    "roberta": ("masked_lm", lambda: tf.RobertaForMaskedLM(tf.RobertaConfig(**{**DECODER, "pad_token_id": 1}))),
    "tags": ("token_classification", lambda: tf.BertForTokenClassification(tf.BertConfig(num_labels=5, **DECODER))),
}
SEQ2SEQ = {
    "t5": lambda: tf.T5ForConditionalGeneration(tf.T5Config(decoder_start_token_id=0, **T5)),
    "bart": lambda: tf.BartForConditionalGeneration(tf.BartConfig(**BART)),
}


def rows(classes: int = VOCAB, pad: int = 0) -> list[dict]:
    """Three sequences of different lengths; about a third of the labels is -100."""
    generator = torch.Generator().manual_seed(3)
    result = []
    for n in LENGTHS:
        ids = torch.randint(3, VOCAB, (n,), generator=generator)
        labels = ids.clone() if classes == VOCAB else torch.randint(0, classes, (n,), generator=generator)
        labels[torch.rand(n, generator=generator) < 0.3] = -100
        labels[n // 2] = 1
        result.append({"input_ids": ids, "labels": labels})
    return result


def padded(given: list[dict], side: str, pad: int = 0, width: int | None = None) -> dict[str, torch.Tensor]:
    """A batch, padded as a tokenizer and its collator would."""
    fills = {"labels": -100, "input_ids": pad}
    given = [{**row, "attention_mask": torch.ones_like(row["input_ids"])} for row in given]
    batch = {}
    for name in given[0]:
        columns = [row[name] for row in given]
        longest = max([len(column) for column in columns] + ([width] if width else []))
        batch[name] = torch.stack(
            [
                torch.nn.functional.pad(
                    column,
                    (longest - len(column), 0) if side == "left" else (0, longest - len(column)),
                    value=fills.get(name, 0),
                )
                for column in columns
            ]
        )
    return batch


def reference(model, name: str, row: dict, aggregation: str = "sum") -> tuple[float, float, dict]:
    """f, q and ∇f of one sample alone in float64, from probabilities, as the formulas are written."""
    model = model.double()
    inputs = {"input_ids": row["input_ids"][None]}
    if name == "seq2seq_lm":
        inputs["labels"] = row["labels"][None]  # the model's own way of making decoder inputs
    logits, labels = model(**inputs).logits[0], row["labels"]
    if name == "causal_lm":
        logits, labels = logits[:-1], labels[1:]
    p = logits[labels != -100].softmax(-1)[torch.arange(int((labels != -100).sum())), labels[labels != -100]]
    margins = torch.log(p / (1 - p))
    f = margins.sum() if aggregation == "sum" else margins.mean()
    gradients = torch.autograd.grad(f, list(model.parameters()), allow_unused=True)
    named = {
        n: torch.zeros_like(v) if g is None else g
        for (n, v), g in zip(model.named_parameters(), gradients, strict=True)
    }
    return float(f.detach()), float((1 - p).mean().detach()), named


def alone_in_float64(build, name: str, given: list[dict], aggregation: str = "sum"):
    torch.manual_seed(5)
    model = build().eval()
    return [reference(model, name, row, aggregation) for row in given]


def engine_result(build, task, batch, engine: str = "hooked"):
    torch.manual_seed(5)
    model = build().eval()
    task.bind(model)
    computer = make_gradient_computer(engine, model, task, device="cpu")
    whole = torch.zeros(len(batch["input_ids"]), computer.layout.total)

    def sink(start, block):
        whole[:, start : start + block.shape[1]] += block

    outputs = computer.stream(batch, sink)
    named = {s.name: whole[:, s.offset : s.offset + s.numel].view(-1, *s.shape) for s in computer.layout.slots}
    return outputs, named


def agree(result, expected) -> None:
    outputs, gradients = result
    for i, (f, q, reference_gradients) in enumerate(expected):
        assert float(outputs.output[i]) == pytest.approx(f, rel=1e-4, abs=1e-4)
        assert float(outputs.out_to_loss[i]) == pytest.approx(q, rel=1e-4)
        scale = math.sqrt(sum(float(g.square().sum()) for g in reference_gradients.values()))
        for name, gradient in reference_gradients.items():
            error = (gradients[name][i].double() - gradient).norm()
            assert float(error) < 2e-4 * scale, (name, float(error), scale)


# -- f, q and gradients against float64, alone and padded on either side ---------------------------------------------


@pytest.mark.few(3)
@pytest.mark.parametrize("aggregation", ["sum", "mean"])
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("family", CAUSAL)
def test_causal_lm_equals_each_sample_alone(family, side, aggregation):
    """Left padding must move neither positions nor the first prediction."""
    given = rows()
    expected = alone_in_float64(CAUSAL[family], "causal_lm", given, aggregation)
    task = type(get_task("causal_lm"))(aggregation=aggregation)
    agree(engine_result(CAUSAL[family], task, padded(given, side)), expected)


@pytest.mark.few(2)
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("family", BESIDE)
def test_labels_beside_the_inputs_equal_each_sample_alone(family, side):
    name, build = BESIDE[family]
    pad = 1 if family == "roberta" else 0
    given = rows(5 if name == "token_classification" else VOCAB)
    expected = alone_in_float64(build, name, given)
    agree(engine_result(build, get_task(name), padded(given, side, pad)), expected)


@pytest.mark.few(2)
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("family", SEQ2SEQ)
def test_seq2seq_equals_each_sample_alone(family, side):
    given = rows()
    targets = [torch.tensor([5, 6, 7, 1]), torch.tensor([9, 1]), torch.tensor([11, 12, 1])]
    given = [{**row, "labels": target} for row, target in zip(given, targets, strict=True)]
    expected = alone_in_float64(SEQ2SEQ[family], "seq2seq_lm", given)
    batch = padded(given, side if family == "t5" else "right")  # BART's encoder counts places, padding included
    batch["labels"] = padded(given, side)["labels"]
    agree(engine_result(SEQ2SEQ[family], get_task("seq2seq_lm"), batch), expected)


@pytest.mark.parametrize("engine", ["functional", "iterative"])
def test_every_engine_gives_the_same(engine):
    given = rows()
    for name, build in (("causal_lm", CAUSAL["gpt2"]), ("masked_lm", BESIDE["bert"][1])):
        expected = alone_in_float64(build, name, given)
        agree(engine_result(build, get_task(name), padded(given, "left"), engine), expected)


def test_a_sample_does_not_depend_on_its_company():
    """Alone, with others, and with more padding than needed."""
    given, task = rows(), get_task("causal_lm")
    together, _ = engine_result(CAUSAL["gpt2"], task, padded(given, "left", width=14))
    for i, row in enumerate(given):
        alone, _ = engine_result(CAUSAL["gpt2"], task, padded([row], "right"))
        torch.testing.assert_close(together.output[i], alone.output[0], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(together.out_to_loss[i], alone.out_to_loss[0], rtol=1e-5, atol=1e-6)


def test_padding_that_was_copied_into_the_labels_does_not_count():
    given = [{"input_ids": row["input_ids"], "labels": row["input_ids"]} for row in rows()]
    expected = alone_in_float64(CAUSAL["gpt2"], "causal_lm", given)
    for side in ("left", "right"):
        batch = padded(given, side)
        batch["labels"] = batch["input_ids"].clone()
        agree(engine_result(CAUSAL["gpt2"], get_task("causal_lm"), batch), expected)


# -- formulas --------------------------------------------------------------------------------------------------------


class Logits(torch.nn.Module):
    """A model whose logits are its parameters."""

    def __init__(self, logits: torch.Tensor) -> None:
        super().__init__()
        self.logits = torch.nn.Parameter(logits)

    def forward(self, **kwargs: torch.Tensor) -> torch.Tensor:
        return self.logits


@pytest.mark.parametrize("aggregation", ["sum", "mean"])
@pytest.mark.parametrize("name", ["causal_lm", "masked_lm", "token_classification", "seq2seq_lm"])
def test_q_is_minus_the_derivative_of_the_loss_as_all_margins_move_alike(name, aggregation):
    """By finite differences of the cross entropy: adding δ to the logit of every label adds δ to every margin."""
    torch.manual_seed(0)
    logits = 2 * torch.randn(3, 6, 9, dtype=torch.float64)
    labels = torch.randint(0, 9, (3, 6))
    labels[0, 2:4] = -100
    batch = {"input_ids": labels.clamp(min=0), "labels": labels}
    if name == "seq2seq_lm":
        batch["decoder_input_ids"] = batch["input_ids"].roll(1, dims=1)
    task = type(get_task(name))(aggregation=aggregation)
    shifted = torch.roll(labels, -1, dims=1) if name == "causal_lm" else labels.clone()
    if name == "causal_lm":
        shifted[:, -1] = -100

    def loss(delta: float) -> torch.Tensor:
        bump = torch.nn.functional.one_hot(shifted.clamp(min=0), 9) * (shifted != -100).unsqueeze(-1) * delta
        tokens = torch.nn.functional.cross_entropy((logits + bump).mT, shifted, reduction="none", ignore_index=-100)
        total = tokens.sum(1)
        return total if aggregation == "sum" else total / (shifted != -100).sum(1)

    def f(delta: float) -> torch.Tensor:
        bump = torch.nn.functional.one_hot(shifted.clamp(min=0), 9) * (shifted != -100).unsqueeze(-1) * delta
        return task.output(logits + bump, batch)

    h = 1e-5
    slope = (loss(h) - loss(-h)) / (f(h) - f(-h))
    torch.testing.assert_close(task.out_to_loss_grad(logits, batch), -slope, rtol=1e-7, atol=1e-9)
    torch.testing.assert_close(task.per_sample_loss(logits, batch), loss(0.0))
    likelihood = type(task)(aggregation=aggregation, unit_output="log_likelihood")
    torch.testing.assert_close(likelihood.output(logits, batch), -loss(0.0))
    assert torch.equal(likelihood.out_to_loss_grad(logits, batch), torch.ones(3, dtype=torch.float64))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sign", [1, -1])
def test_margins_are_finite_at_60(sign, dtype):
    """Per token, with gradient."""
    for name in ("causal_lm", "masked_lm", "token_classification", "seq2seq_lm"):
        logits = torch.zeros(2, 4, 8, dtype=dtype)
        labels = torch.full((2, 4), 3)
        logits[..., 3] = 60 * sign
        logits.requires_grad_()
        batch = {"input_ids": labels, "decoder_input_ids": labels, "labels": labels}
        task = get_task(name)
        counted = 3 if name == "causal_lm" else 4
        f = task.output(logits, batch)
        torch.testing.assert_close(f, torch.full((2,), counted * (60.0 * sign - math.log(7))))
        (gradient,) = torch.autograd.grad(f.sum(), logits)
        assert bool(gradient.isfinite().all()) and float(gradient[0, 1, 3]) == 1.0
        q = task.out_to_loss_grad(logits, batch)
        expected = math.exp(-(60 - math.log(7))) if sign == 1 else 1.0
        torch.testing.assert_close(q, torch.full((2,), expected), rtol=1e-4, atol=0)


# -- which tokens are labels -----------------------------------------------------------------------------------------


def f_and_q(name, batch, logits, side="train", **kwargs):
    task = type(get_task(name))(**kwargs)
    return task.output(logits, batch, side), task.out_to_loss_grad(logits, batch, side)


def test_trl_masks_say_what_the_model_is_trained_to_produce():
    torch.manual_seed(1)
    ids = torch.randint(0, 9, (2, 6))
    logits = torch.randn(2, 6, 9)
    completion = torch.tensor([[0, 0, 1, 1, 1, 1], [0, 0, 0, 0, 1, 1]])
    assistant = torch.tensor([[0, 0, 1, 1, 0, 1], [0, 0, 0, 0, 1, 1]])
    attention = torch.tensor([[1, 1, 1, 1, 1, 1], [0, 1, 1, 1, 1, 1]])

    def labelled(*masks):
        labels = ids.clone()
        for mask in masks:
            labels[mask == 0] = -100
        return {"input_ids": ids, "attention_mask": attention, "labels": labels}

    for masks in ({"completion_mask": completion}, {"completion_mask": completion, "assistant_masks": assistant}):
        expected = f_and_q("causal_lm", labelled(*masks.values()), logits)
        for batch in (
            {"input_ids": ids, "attention_mask": attention, **masks},
            {"input_ids": ids, "attention_mask": attention, "labels": ids, **masks},
        ):
            torch.testing.assert_close(f_and_q("causal_lm", batch, logits), expected)
            inputs = get_task("causal_lm").model_inputs(batch)[1]
            assert set(inputs) == {"input_ids", "attention_mask"}  # no model takes the masks


def test_a_target_mask_leaves_labels_out_and_weights_replace_the_aggregation():
    torch.manual_seed(1)
    ids, logits = torch.randint(0, 9, (2, 6)), torch.randn(2, 6, 9)
    span = torch.tensor([[0, 0, 1, 1, 0, 0], [0, 0, 0, 0, 0, 1]])
    batch = {"input_ids": ids, "labels": ids}
    marked = {"input_ids": ids, "labels": torch.where(span == 1, ids, -100)}
    for aggregation in ("sum", "mean"):
        expected = f_and_q("causal_lm", marked, logits, aggregation=aggregation)
        given = f_and_q("causal_lm", {**batch, "target_mask": span}, logits, aggregation=aggregation)
        torch.testing.assert_close(given, expected)
    singles = []
    for t in range(1, 6):
        weights = torch.zeros(2, 6)
        weights[:, t] = 1.0
        singles.append(f_and_q("causal_lm", {**batch, "target_weights": weights}, logits, aggregation="mean")[0])
    torch.testing.assert_close(sum(singles), f_and_q("causal_lm", batch, logits)[0])
    weights = torch.tensor([[0, 0.5, 2.0, 0, 0, -1.0]]).expand(2, -1)
    expected = 0.5 * singles[0] + 2 * singles[1] - singles[4]
    torch.testing.assert_close(f_and_q("causal_lm", {**batch, "target_weights": weights}, logits)[0], expected)


def test_training_rows_without_labels_count_nothing_and_such_targets_are_refused():
    """A row whose completion was truncated away contributes nothing to training."""
    ids, logits = torch.randint(0, 9, (3, 4)), torch.randn(3, 4, 9, requires_grad=True)
    labels = ids.clone()
    labels[1] = -100
    batch = {"input_ids": ids, "labels": labels}
    for aggregation in ("sum", "mean"):
        f, q = f_and_q("causal_lm", batch, logits, aggregation=aggregation)
        assert float(f[1]) == float(q[1]) == 0.0 and float(q[0]) > 0
        (gradient,) = torch.autograd.grad(f.sum(), logits)
        assert not gradient[1].any() and bool(gradient.isfinite().all())
        with pytest.raises(ValueError, match=r"Sample 1 of 3 targets has no label.*truncation"):
            f_and_q("causal_lm", batch, logits, side="target", aggregation=aggregation)


def test_a_packed_row_is_one_sample_the_sum_of_its_documents():
    """Positions that start anew tell the model where a document ends; every label in the row counts."""
    torch.manual_seed(5)
    model, task = CAUSAL["llama"]().eval(), get_task("causal_lm")
    model.config.use_cache = False  # as the engines and TRL have it: with a cache, transformers looks for no packing
    task.bind(model)
    documents = [row["input_ids"] for row in rows()]
    ids = torch.cat(documents)[None]
    positions = torch.cat([torch.arange(len(document)) for document in documents])[None]
    packed = {"input_ids": ids, "position_ids": positions, "labels": ids.masked_fill(positions == 0, -100)}
    f = task.output(model(**task.model_inputs(packed)[1]), packed)
    alone = []
    for document in documents:
        batch = {"input_ids": document[None], "labels": document[None]}
        alone.append(task.output(model(**task.model_inputs(batch)[1]), batch))
    torch.testing.assert_close(f, sum(alone), rtol=1e-4, atol=1e-4)


# -- bad input -------------------------------------------------------------------------------------------------------


def test_text_without_labels_is_refused_with_the_remedy():
    batch = {"input_ids": torch.ones(2, 4, dtype=torch.long), "attention_mask": torch.ones(2, 4)}
    for name in ("causal_lm", "masked_lm", "token_classification"):
        with pytest.raises(ValueError, match=r"\['input_ids', 'attention_mask'\], and so no labels.*mlm=False"):
            get_task(name).output(torch.zeros(2, 4, 8), batch)
    with pytest.raises(ValueError, match=r"no labels.*text_target"):
        get_task("seq2seq_lm").output(torch.zeros(2, 4, 8), batch)


def test_labels_and_masks_of_another_length_are_refused():
    ids = torch.ones(2, 5, dtype=torch.long)
    task = get_task("causal_lm")
    with pytest.raises(ValueError, match=r"labels have the shape \(2, 4\), the inputs \(2, 5\).*Fill up with -100"):
        task.output(torch.zeros(2, 5, 8), {"input_ids": ids, "labels": ids[:, :4]})
    for name in ("completion_mask", "target_mask", "target_weights"):
        with pytest.raises(ValueError, match=rf"`{name}` has the shape \(2, 4\).*\(2, 5\)"):
            task.output(torch.zeros(2, 5, 8), {"input_ids": ids, "labels": ids, name: ids[:, :4]})
    with pytest.raises(ValueError, match=r"the shape \(2,\).*'text_classification'"):
        task.output(torch.zeros(2, 5, 8), {"input_ids": ids, "labels": ids[:, 0]})
    with pytest.raises(TypeError, match=r"`labels` is a list.*DataCollatorFor"):
        task.output(torch.zeros(2, 5, 8), {"input_ids": ids, "labels": [[1, 2], [3]]})
    with pytest.raises(ValueError, match=r"both labels and label"):
        task.output(torch.zeros(2, 5, 8), {"input_ids": ids, "labels": ids, "label": ids})


def test_a_label_beyond_the_vocabulary_is_named():
    labels = torch.tensor([[1, 2, 3], [1, 2, 8]])
    for name in ("causal_lm", "masked_lm", "seq2seq_lm"):
        batch = {"input_ids": labels, "decoder_input_ids": labels, "labels": labels}
        with pytest.raises(ValueError, match=r"Token 2 of sample 1 has the label 8, but the model has 8 classes"):
            get_task(name).out_to_loss_grad(torch.zeros(2, 3, 8), batch)


@pytest.mark.parametrize("name", ["causal_lm", "masked_lm", "token_classification"])
def test_a_model_without_the_head_is_refused(name):
    bare = tf.BertModel(tf.BertConfig(**DECODER)).eval()
    classifier = tf.BertForSequenceClassification(tf.BertConfig(**DECODER)).eval()
    batch = padded(rows(), "right")
    task = get_task(name)
    for model, found in ((bare, r"last_hidden_state"), (classifier, r"shape \(3, 2\)")):
        with pytest.raises(ValueError, match=rf"{found}.*Load the model with `{task.head}`"):
            task.output(model(**task.model_inputs(batch)[1]), batch)
        with pytest.raises(ValueError, match=task.head):
            engine_result(lambda model=model: model, task, batch, "auto")


def test_seq2seq_needs_to_know_what_the_decoder_reads():
    ids = torch.ones(1, 3, dtype=torch.long)
    with pytest.raises(ValueError, match=r"no `decoder_input_ids`.*decoder_start_token_id"):
        get_task("seq2seq_lm").model_inputs({"input_ids": ids, "labels": ids})


def test_options_are_words():
    for name in ("causal_lm", "multi_label_classification"):
        with pytest.raises(ValueError, match=r"`aggregation` is 'max'. Expected one of \['sum', 'mean'\]"):
            type(get_task(name))(aggregation="max")
        with pytest.raises(ValueError, match=r"`unit_output` is 'loss'"):
            type(get_task(name))(unit_output="loss")


# -- calling conventions ---------------------------------------------------------------------------------------------


def test_tuple_batches_are_read_by_position():
    given = rows()
    batch = padded(given, "right")
    model, task = CAUSAL["gpt2"]().eval(), get_task("causal_lm")
    for names in (("input_ids", "attention_mask", "labels"), ("input_ids", "labels")):
        items = tuple(batch[name] for name in names)
        assert set(task.model_inputs(items)[1]) == set(names) - {"labels"}
        f = task.output(model(**task.model_inputs(items)[1]), items)
        torch.testing.assert_close(f, task.output(model(**task.model_inputs(batch)[1]), batch), rtol=1e-4, atol=1e-4)
    with pytest.raises(ValueError, match=r"sequence of 4 tensor\(s\)"):
        task.model_inputs((batch["input_ids"],) * 4)


def test_decoder_inputs_are_the_models_own():
    """The decoder inputs that the model makes of labels, and those that the task gives it, must be the same."""
    labels = torch.tensor([[5, 6, 7, 1], [9, 1, -100, -100]])
    inputs = torch.randint(3, VOCAB, (2, 5))
    for build in SEQ2SEQ.values():
        model, task = build().eval(), get_task("seq2seq_lm")
        task.bind(model)
        own = model(input_ids=inputs, labels=labels).logits
        given = model(**task.model_inputs({"input_ids": inputs, "labels": labels})[1]).logits
        torch.testing.assert_close(given, own)


@pytest.mark.slow
def test_positions_are_counted_through_wrappers_too():
    model, batch = CAUSAL["gpt2"](), padded(rows(), "left")
    for wrapped in (model, torch.compile(model), torch.nn.DataParallel(model)):
        task = get_task("causal_lm")
        task.bind(wrapped)
        positions = task.model_inputs(batch)[1]["position_ids"]
        assert positions[1].tolist() == [0, 0, 0, 0, 0, 0, 1, 2, 3]
    given = {**batch, "position_ids": torch.zeros(3, 9, dtype=torch.long)}
    assert not task.model_inputs(given)[1]["position_ids"].any()


def test_prompt_tuning_puts_tokens_in_front():
    import peft

    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3, prompt_tuning_init="RANDOM")
    model = peft.get_peft_model(CAUSAL["gpt2"](), config).eval()
    task, batch = get_task("causal_lm"), padded(rows(), "right")
    task.bind(model)
    result = model(**task.model_inputs(batch)[1])
    assert result.logits.shape[1] == 9 + 3
    losses = task.per_sample_loss(result, batch)  # the last virtual token predicts the first real one
    for row in range(len(losses)):
        single = {name: value[row : row + 1] for name, value in batch.items()}
        labels = single["labels"].masked_fill(single["attention_mask"] == 0, -100)
        own = model(**{**single, "labels": labels}, num_items_in_batch=1).loss
        torch.testing.assert_close(losses[row], own, rtol=1e-5, atol=1e-5)


# -- collating -------------------------------------------------------------------------------------------------------


class Padder:
    """A stand-in for a tokenizer's `pad`, with what `DataCollatorWithPadding` asks of one."""

    def __init__(self, side: str) -> None:
        self.padding_side = side
        self.deprecation_warnings: dict[str, bool] = {}

    def pad(self, features, **kwargs):
        assert all(set(row) <= {"input_ids"} for row in features)
        return padded([{"input_ids": torch.as_tensor(row["input_ids"])} for row in features], self.padding_side)


@pytest.mark.parametrize("side", ["left", "right"])
def test_token_columns_end_up_beside_their_tokens(side):
    given = [
        {
            "input_ids": row["input_ids"].tolist(),
            "labels": row["labels"].tolist(),
            "completion_mask": [int(i > 1) for i in range(len(row["labels"]))],
            "target_weights": [i / 4 for i in range(len(row["labels"]))],
        }
        for row in rows()
    ]
    batch = TokenColumnsCollator(DataCollatorWithPadding(Padder(side)), beside="input_ids")(given)
    for i, row in enumerate(given):
        real = batch["attention_mask"][i] == 1
        for name in ("input_ids", "labels", "completion_mask", "target_weights"):
            assert batch[name][i][real].tolist() == row[name], name
        assert bool((batch["labels"][i][~real] == -100).all())
        assert not batch["target_weights"][i][~real].any()


def test_a_column_of_another_length_is_refused_by_row():
    collator = TokenColumnsCollator(DataCollatorWithPadding(Padder("right")), beside="input_ids")
    given = [{"input_ids": [1, 2, 3], "labels": [1, 2, 3]}, {"input_ids": [4, 5], "labels": [4]}]
    with pytest.raises(ValueError, match=r"Row 1 of the batch has 1 entries in `labels`, but 2 in `input_ids`"):
        collator(given)
    given[1] = {"input_ids": [4, 5], "labels": None}
    with pytest.raises(ValueError, match=r"Row 1 of the batch has None in `labels`"):
        collator(given)


def test_other_rows_pass_unchanged():
    inner = [object()]
    assert TokenColumnsCollator(lambda given: given, "input_ids")(inner) is inner
    given = [{"input_ids": [1], "labels": 0}]
    assert TokenColumnsCollator(lambda given: given, "input_ids")(given) == given
