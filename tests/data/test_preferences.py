"""Tasks of preferences and policies: gradients of rows in padded batches against a loss written by hand, for each row
alone and without padding."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import DataCollatorWithPadding, default_data_collator

from hf_trak import TrakAttributor, TrakConfig
from hf_trak.gradient_computers import make_gradient_computer, per_sample_gradients
from hf_trak.modelout_functions import LossModelOutput, get_task
from hf_trak.modelout_functions.base import BatchedModelOutput
from hf_trak.modelout_functions.dpo import DPOModelOutput, ORPOModelOutput, RewardModelOutput
from hf_trak.modelout_functions.draws import Draws
from hf_trak.modelout_functions.kto import KTOModelOutput
from hf_trak.modelout_functions.pairs import PairCollator
from hf_trak.modelout_functions.policy import GRPOModelOutput, PPOModelOutput

VOCAB = 24
SIZES = {
    "hidden_size": 16, "intermediate_size": 20, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "vocab_size": VOCAB, "max_position_embeddings": 64, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
GPT2 = {"n_embd": 16, "n_layer": 2, "n_head": 2, "vocab_size": VOCAB, "n_positions": 64, "pad_token_id": 0}
LENGTHS = ((3, 5, 2), (1, 2, 7), (6, 1, 1), (2, 4, 4))
"""Tokens of prompt, chosen and rejected answer of every row."""


def causal_lm(kind: str, dtype: torch.dtype) -> torch.nn.Module:
    torch.manual_seed(0)
    if kind == "gpt2":
        return tf.GPT2LMHeadModel(tf.GPT2Config(**GPT2)).to(dtype).eval()
    model: Any = tf.LlamaForCausalLM(tf.LlamaConfig(**SIZES)).to(dtype).eval()
    return with_adapter(model, "CAUSAL_LM") if kind == "lora" else model


def reward_model(kind: str, dtype: torch.dtype) -> torch.nn.Module:
    torch.manual_seed(0)
    if kind == "gpt2":
        return tf.GPT2ForSequenceClassification(tf.GPT2Config(num_labels=1, **GPT2)).to(dtype).eval()
    model: Any = tf.LlamaForSequenceClassification(tf.LlamaConfig(num_labels=1, **SIZES)).to(dtype).eval()
    return with_adapter(model, "SEQ_CLS") if kind == "lora" else model


def with_adapter(model: Any, task: str) -> torch.nn.Module:
    config = LoraConfig(r=3, lora_alpha=8, target_modules=["q_proj", "v_proj", "down_proj"], task_type=task)
    adapted = get_peft_model(model, config, autocast_adapter_dtype=False)
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    return adapted.eval()


def tokens(count: int, generator: torch.Generator) -> list[int]:
    return torch.randint(3, VOCAB, (count,), generator=generator).tolist()


def exact(values: Tensor) -> list[float]:
    """Numbers that float32 holds without rounding, as batches do."""
    return (values * 64).round().div(64).tolist()


def rows() -> list[dict[str, Any]]:
    """Rows with the columns of all tasks; answers of a row differ in length, and so do rows."""
    generator = torch.Generator().manual_seed(1)
    made = []
    for place, (prompt, chosen, rejected) in enumerate(LENGTHS):
        draw = exact(torch.randn(32, generator=generator))
        made.append(
            {
                "prompt_ids": tokens(prompt, generator),
                "chosen_ids": tokens(chosen, generator),
                "rejected_ids": tokens(rejected, generator),
                "ref_chosen_logps": -3.0 * chosen + draw[0],
                "ref_rejected_logps": -3.0 * rejected + draw[1],
                "margin": 0.25 * draw[2],
                "completion_ids": tokens(chosen, generator),
                "KL_completion_ids": tokens(rejected, generator),
                "ref_logps": -3.0 * chosen + draw[3],
                "ref_KL_logps": -3.5 * rejected + draw[4],
                "label": place % 2 == 0,
                "advantage": draw[5],
            }
        )
    return made


def rollouts() -> list[dict[str, Any]]:
    """Rollouts with numbers per token, around the log-probabilities of a random model, so that some are clipped."""
    generator = torch.Generator().manual_seed(2)
    made = []
    for row in rows():
        count = len(row["completion_ids"])
        columns = {
            "advantage": exact(torch.randn(count, generator=generator)),
            "old_logps": exact(-3.2 + 0.3 * torch.randn(count, generator=generator)),
            "ref_logps": exact(-3.2 + 0.3 * torch.randn(count, generator=generator)),
        }
        made.append({"prompt_ids": row["prompt_ids"], "completion_ids": row["completion_ids"], **columns})
    return made


def log_probs(model: torch.nn.Module, prompt: list[int], answer: list[int], temperature: float = 1.0) -> Tensor:
    """Log-probabilities of all tokens but the first, from one sequence without padding."""
    ids = torch.tensor([prompt + answer])
    logits = model(input_ids=ids).logits[0, :-1] / temperature
    return logits.log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]


def answer_log_probs(model: torch.nn.Module, prompt: list[int], answer: list[int], temperature: float = 1.0) -> Tensor:
    return log_probs(model, prompt, answer, temperature)[len(prompt) - 1 :]


def both(model: torch.nn.Module, row: dict[str, Any]) -> tuple[Tensor, Tensor]:
    return tuple(answer_log_probs(model, row["prompt_ids"], row[name]) for name in ("chosen_ids", "rejected_ids"))  # type: ignore[return-value]


def dpo_loss(model: torch.nn.Module, row: dict[str, Any], kind: str) -> Tensor:
    chosen, rejected = both(model, row)
    ratios = [chosen.sum() - row["ref_chosen_logps"], rejected.sum() - row["ref_rejected_logps"]]
    if kind in ("ipo", "sigmoid_norm"):
        ratios = [ratios[0] / len(chosen), ratios[1] / len(rejected)]
    delta = ratios[0] - ratios[1]
    if kind == "ipo":
        return (delta - 1 / (2 * 0.4)) ** 2
    if kind == "hinge":
        return torch.relu(1 - 0.4 * delta)
    right, wrong = -torch.log(torch.sigmoid(0.4 * delta)), -torch.log(torch.sigmoid(-0.4 * delta))
    return (0.9 * right - 0.1 * wrong) / 0.8 if kind == "robust" else right


def reward_loss(model: torch.nn.Module, row: dict[str, Any], coefficient: float) -> Tensor:
    chosen, rejected = (
        model(input_ids=torch.tensor([row["prompt_ids"] + row[name]])).logits[0, 0]
        for name in ("chosen_ids", "rejected_ids")
    )
    return -torch.log(torch.sigmoid(chosen - rejected - row["margin"])) + coefficient * (chosen + rejected) ** 2


def kto_loss(model: torch.nn.Module, row: dict[str, Any], kl: float) -> Tensor:
    ratio = answer_log_probs(model, row["prompt_ids"], row["completion_ids"]).sum() - row["ref_logps"]
    if row["label"]:
        return 1.3 * (1 - torch.sigmoid(0.4 * (ratio - kl)))
    return 0.7 * (1 - torch.sigmoid(0.4 * (kl - ratio)))


def orpo_loss(model: torch.nn.Module, row: dict[str, Any]) -> Tensor:
    odds = []
    for answer in both(model, row):
        probability = answer.mean().exp()
        odds.append(probability / (1 - probability))
    nll = -log_probs(model, row["prompt_ids"], row["chosen_ids"]).mean()
    return nll - 0.4 * torch.log(torch.sigmoid(torch.log(odds[0] / odds[1])))


def grpo_loss(model: torch.nn.Module, row: dict[str, Any], aggregation: str) -> Tensor:
    values = answer_log_probs(model, row["prompt_ids"], row["completion_ids"], 0.8)
    return -row["advantage"] * (values.mean() if aggregation == "mean" else values.sum())


def ppo_loss(model: torch.nn.Module, row: dict[str, Any]) -> Tensor:
    values = answer_log_probs(model, row["prompt_ids"], row["completion_ids"])
    advantage, old, reference = (
        torch.tensor(row[name]).to(values) for name in ("advantage", "old_logps", "ref_logps")
    )
    ratio = (values - old).exp()
    gains = torch.min(ratio * advantage, ratio.clamp(0.8, 1.3) * advantage)
    return -(gains - 0.05 * ((reference - values).exp() - (reference - values) - 1)).mean()


CASES: dict[str, tuple[BatchedModelOutput, Any]] = {
    **{
        f"dpo-{kind}": (DPOModelOutput(0.4, kind, 0.1), lambda m, r, k=kind: dpo_loss(m, r, k))
        for kind in ("sigmoid", "sigmoid_norm", "hinge", "ipo", "robust")
    },  # type: ignore[dict-item]
    "reward": (RewardModelOutput(), lambda m, r: reward_loss(m, r, 0.0)),
    "reward-centered": (RewardModelOutput(0.2), lambda m, r: reward_loss(m, r, 0.2)),
    "kto": (KTOModelOutput(0.4, 1.3, 0.7, kl=0.6), lambda m, r: kto_loss(m, r, 0.6)),
    "kto-apo": (KTOModelOutput(0.4, 1.3, 0.7, "apo_zero_unpaired"), lambda m, r: kto_loss(m, r, 0.0)),
    "orpo": (ORPOModelOutput(0.4), orpo_loss),
    "grpo": (GRPOModelOutput(temperature=0.8), lambda m, r: grpo_loss(m, r, "mean")),
    "grpo-sum": (GRPOModelOutput("sum", 0.8), lambda m, r: grpo_loss(m, r, "sum")),
    "ppo": (PPOModelOutput(epsilon_high=0.3, beta=0.05), ppo_loss),
}


def given(name: str, kind: str, dtype: torch.dtype) -> tuple[torch.nn.Module, list[dict[str, Any]]]:
    model = (reward_model if name.startswith("reward") else causal_lm)(kind, dtype)
    return model, rollouts() if name == "ppo" else rows()


def batch_of(task: BatchedModelOutput, some: list[dict[str, Any]]) -> Any:
    return task.collator(default_data_collator)(some)


def gradient_alone(model: torch.nn.Module, loss: Tensor) -> dict[str, Tensor]:
    wanted = {name: p for name, p in model.named_parameters() if p.requires_grad}
    found = torch.autograd.grad(loss, list(wanted.values()), allow_unused=True)
    return {
        name: torch.zeros_like(p) if gradient is None else gradient
        for (name, p), gradient in zip(wanted.items(), found, strict=True)
    }


@pytest.mark.few(5)
@pytest.mark.parametrize("kind", ["full", "lora", "gpt2"])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
def test_rows_have_the_gradient_of_their_own_loss(name: str, kind: str, dtype: torch.dtype) -> None:
    task, loss_of = CASES[name]
    model, some = given(name, kind, dtype)
    task.bind(model)
    batch = batch_of(task, some)
    gradients = per_sample_gradients(model, batch, task, engine="hooked")
    with torch.no_grad():
        result = model(*task.model_inputs(batch)[0], **task.model_inputs(batch)[1])
        q = task.out_to_loss_grad(result, batch)
        losses = task.per_sample_loss(result, batch)  # type: ignore[attr-defined]
    # sums over some thirty tokens and two layers; the norms of Llama compute in float32 in any case
    tolerance = 1e-5 if dtype == torch.float32 else 1e-11 if kind == "gpt2" else 1e-6
    for place, row in enumerate(some):
        loss = loss_of(model, row)
        torch.testing.assert_close(losses[place], loss.detach(), rtol=tolerance, atol=tolerance)
        expected = gradient_alone(model, loss)
        difference = sum((-q[place] * gradients[n][place] - expected[n]).square().sum() for n in expected)
        norm = sum(g.square().sum() for g in expected.values())
        assert difference.sqrt() <= tolerance * norm.sqrt() + (tolerance if norm == 0 else 0)


@pytest.mark.few(2)
@pytest.mark.parametrize("name", CASES)
def test_all_engines_agree(name: str) -> None:
    task, _ = CASES[name]
    model, some = given(name, "full", torch.float64)
    task.bind(model)
    batch = batch_of(task, some)
    found = {
        engine: per_sample_gradients(model, batch, task, engine=engine)
        for engine in ("hooked", "functional", "iterative")
    }
    for engine in ("functional", "iterative"):
        for parameter, gradient in found["hooked"].items():
            torch.testing.assert_close(found[engine][parameter], gradient, rtol=1e-9, atol=1e-12)


@pytest.mark.few(2)
@pytest.mark.parametrize("name", ["dpo-sigmoid", "kto", "orpo", "grpo", "ppo"])
def test_targets_need_no_reference_and_no_advantage(name: str) -> None:
    """Their features are those of the same targets with them, since references are constants."""
    task, _ = CASES[name]
    model, some = given(name, "full", torch.float64)
    task.bind(model)
    bare = [{k: v for k, v in row.items() if "logps" not in k and k != "advantage"} for row in some]
    found = []
    for given_rows in (some, bare):
        computer = make_gradient_computer("hooked", model, task, None, torch.float64, "cpu")
        blocks = torch.zeros(len(some), computer.layout.total, dtype=torch.float64)

        def sink(start: int, block: Tensor, blocks: Tensor = blocks) -> None:
            blocks[:, start : start + block.shape[1]] += block

        computer.stream(batch_of(task, given_rows), sink, "target")
        found.append(blocks)
    torch.testing.assert_close(found[0], found[1], rtol=1e-12, atol=1e-14)
    assert found[0].abs().sum() > 0


def test_training_rows_need_their_reference() -> None:
    task = get_task("dpo")
    model, some = given("dpo", "full", torch.float32)
    task.bind(model)
    bare = [{k: v for k, v in row.items() if "logps" not in k} for row in some]
    with pytest.raises(ValueError, match=r"`ref_chosen_logps` .*`precompute_ref_log_probs=True`"):
        per_sample_gradients(model, batch_of(task, bare), task)  # type: ignore[arg-type]


def test_the_reference_point_of_kto_is_the_mean_over_rows() -> None:
    task = KTOModelOutput(0.4, kl_rows=3)
    model, some = given("kto", "full", torch.float64)
    task.bind(model)
    assert list(task.reference_rows(7)) == [0, 2, 4] and task.reference_rows(2) == [0, 1]
    with pytest.raises(ValueError, match="The reference point"):
        per_sample_gradients_q(task, model, some)
    task.prepare(model, [batch_of(task, some[:2]), batch_of(task, some[2:])])
    with torch.no_grad():
        ratios = [
            answer_log_probs(model, row["prompt_ids"], row["KL_completion_ids"]).sum() - row["ref_KL_logps"]
            for row in some
        ]
    expected = torch.stack(ratios).mean()
    assert expected > 0.1
    torch.testing.assert_close(task.references()["kl"], expected, rtol=1e-6, atol=0)
    other = KTOModelOutput(0.4)
    other.restore(model, task.references())
    torch.testing.assert_close(per_sample_gradients_q(other, model, some), per_sample_gradients_q(task, model, some))
    with pytest.raises(ValueError, match="Expected `kl`"):
        other.restore(model, {})


def per_sample_gradients_q(task: BatchedModelOutput, model: torch.nn.Module, some: list[dict[str, Any]]) -> Tensor:
    batch = batch_of(task, some)
    with torch.no_grad():
        return task.out_to_loss_grad(model(**task.model_inputs(batch)[1]), batch)


@pytest.mark.slow
def test_labels_are_drawn_with_the_probability_of_the_preference() -> None:
    task = DPOModelOutput(0.4)
    model, some = given("dpo", "full", torch.float64)
    task.bind(model)
    batch = batch_of(task, some)
    with torch.no_grad():
        result = model(**task.model_inputs(batch)[1])
        margin = task.output(result, batch)
        drawn = [
            task.sampled_log_likelihood(result, batch, Draws(seed, torch.arange(len(some)))) for seed in range(2000)
        ]
    chosen = torch.stack([value == torch.nn.functional.logsigmoid(margin) for value in drawn]).double().mean(0)
    # five standard deviations of a mean of 2,000 draws
    assert bool(((chosen - torch.sigmoid(margin)).abs() < 5 * 0.5 / 2000**0.5).all())
    with pytest.raises(TypeError, match=r'curvature.labels="empirical"'):
        DPOModelOutput(0.4, "ipo").sampled_log_likelihood(result, batch, Draws(0, torch.arange(len(some))))


def test_a_stacked_batch_of_a_trainer_becomes_pairs() -> None:
    stacked = {
        "input_ids": torch.arange(12).view(4, 3),
        "attention_mask": torch.ones(4, 3),
        "ref_chosen_logps": torch.tensor([1.0, 2.0]),
    }
    batch = PairCollator(lambda rows: stacked)([{}, {}])
    assert batch["input_ids"].tolist() == [[[0, 1, 2], [6, 7, 8]], [[3, 4, 5], [9, 10, 11]]]
    assert batch["ref_chosen_logps"].tolist() == [1.0, 2.0] and next(iter(batch)) == "input_ids"
    with pytest.raises(ValueError, match=r"made `input_ids` of \(4, 3\) from 3 pairs"):
        PairCollator(lambda rows: stacked)([{}, {}, {}])


def test_padding_takes_the_token_of_the_tokenizer() -> None:
    class Padding(DataCollatorWithPadding):
        def __init__(self) -> None:
            self.tokenizer = type("Tokenizer", (), {"pad_token_id": 7})()

    collator = DPOModelOutput().collator(Padding())
    batch = collator(rows()[:2])
    assert batch["input_ids"].shape == (2, 2, 8)
    assert bool((batch["input_ids"][batch["attention_mask"] == 0] == 7).all())
    assert batch["completion_mask"].sum(2).tolist() == [[5, 2], [2, 7]]
    with pytest.raises(ValueError, match=r"not \['rejected_ids'\]"):
        collator([{"chosen_ids": [3]}])


def test_rows_of_tokens_need_no_trainer(tmp_path: Path) -> None:
    """The default collator, which knows no pairs, is not asked."""
    model, some = given("dpo", "full", torch.float32)
    kept = ("prompt_ids", "chosen_ids", "rejected_ids", "ref_chosen_logps", "ref_rejected_logps")
    dataset = Dataset.from_list([{name: row[name] for name in kept} for row in some])
    config = TrakConfig(output_dir=str(tmp_path), proj_dim=16, use_cpu=True, budget="fast")
    attributor = TrakAttributor(model, config, dataset, task="dpo").featurize()
    scored = attributor.attribute(dataset.select([2]), top_k=None)
    assert int(torch.tensor(scored["trak_scores"][0]).argmax()) == 2


def test_values_that_cannot_be_attributed_are_refused() -> None:
    model, some = given("dpo", "full", torch.float32)
    for task, change, message in (
        (DPOModelOutput(), {"rejected_ids": []}, "A completion of sample 1 of the batch has no token"),
        (DPOModelOutput(), {"ref_chosen_logps": float("nan")}, "The margin of sample 1 is not finite"),
        (GRPOModelOutput(), {"advantage": float("inf")}, "The advantage of sample 1 is not finite"),
        (GRPOModelOutput(), {"advantage": [1.0]}, "Row 1 of the batch has 1 entries in `advantage`"),
        (GRPOModelOutput(), {"completion_ids": None}, "no `completion_ids`"),
    ):
        task.bind(model)
        changed = [row if place != 1 else {**row, **change} for place, row in enumerate(some)]
        with pytest.raises(ValueError, match=message):
            per_sample_gradients_q(task, model, changed)


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (DPOModelOutput, {"beta": 0.0}, "`beta` is 0.0"),
        (DPOModelOutput, {"loss_type": "aot"}, "`loss_type` is 'aot'"),
        (DPOModelOutput, {"label_smoothing": 0.5}, "`label_smoothing` is 0.5"),
        (KTOModelOutput, {"loss_type": "bco"}, "`loss_type` is 'bco'"),
        (KTOModelOutput, {"kl": -1.0}, "`kl` is -1.0"),
        (RewardModelOutput, {"center_rewards_coefficient": -1.0}, "`center_rewards_coefficient` is -1.0"),
        (GRPOModelOutput, {"aggregation": "max"}, "`aggregation` is 'max'"),
        (PPOModelOutput, {"beta": -0.1}, "`beta` is -0.1"),
    ],
)
def test_arguments_are_checked(kind: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        kind(**options)


def test_the_task_loss_takes_the_loss_of_a_preference() -> None:
    """−∇ℓ = q ∇f, whichever side q is on."""
    model, some = given("dpo", "gpt2", torch.float64)
    inner = DPOModelOutput(0.4)
    outer = LossModelOutput(inner)
    outer.bind(model)
    batch = batch_of(inner, some)
    q = per_sample_gradients_q(inner, model, some)
    plain, loss = (per_sample_gradients(model, batch, task) for task in (inner, outer))
    for name, gradient in plain.items():
        weights = q.view(-1, *[1] * (gradient.ndim - 1))
        torch.testing.assert_close(loss[name], weights * gradient, rtol=1e-9, atol=1e-12)


def test_rows_of_a_plain_trainer_may_be_of_any_kind(tmp_path):
    config = tf.BertConfig(
        vocab_size=10, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8
    )
    rows = [{"input_ids": [1, 2, 3], "labels": place % 2} for place in range(4)]
    args = tf.TrainingArguments(str(tmp_path / "out"), use_cpu=True, report_to=[])
    trainer = tf.Trainer(tf.BertForSequenceClassification(config), args, train_dataset=rows)
    own = TrakAttributor.from_trainer(trainer, TrakConfig(str(tmp_path / "trak"), use_cpu=True))
    assert own.train_dataset is rows
