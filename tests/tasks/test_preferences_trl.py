"""Trainers of preferences, rewards and policies of TRL as they are: their rows, their reference models and their loss,
row by row."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from test_trl import WORDS, arguments, llama, texts, tokenizer
from torch import Tensor
from transformers import LlamaForSequenceClassification, MixtralConfig, MixtralForCausalLM

from hf_trak import TrakAttributor, TrakConfig
from hf_trak.data.preferences import kind_of, prepared_rows
from hf_trak.data.reference_log_probs import DIRECTORY
from hf_trak.gradient_computers import per_sample_gradients
from hf_trak.methods import Replay
from hf_trak.modelout_functions import GRPOModelOutput, KTOModelOutput, PPOModelOutput

trl = pytest.importorskip("trl")
orpo = pytest.importorskip("trl.experimental.orpo")
peft = pytest.importorskip("peft")

LORA = {"r": 2, "target_modules": ["q_proj", "v_proj"]}
CHAT = (
    "{% for message in messages %}{{ message['content'] + ' ' }}{% endfor %}{% if add_generation_prompt %}{% endif %}"
)


def pairs(count: int = 6, seed: int = 0) -> Dataset:
    columns = {
        **texts(count, "prompt", seed),
        **texts(count, "chosen", seed + 1),
        **texts(count, "rejected", seed + 2),
    }
    return Dataset.from_dict({k: [" " + v if k != "prompt" else v for v in values] for k, values in columns.items()})


def unpaired(count: int = 6, seed: int = 0) -> Dataset:
    columns = {**texts(count, "prompt", seed), **texts(count, "completion", seed + 1)}
    return Dataset.from_dict({**columns, "label": [i % 2 == 0 for i in range(count)]})


def scorer() -> LlamaForSequenceClassification:
    torch.manual_seed(0)
    return LlamaForSequenceClassification(llama(num_labels=1).config).eval()


def moved(model: Any, by: float = 0.3) -> Any:
    """The model away from its reference, as after a training; of an adapter, the part that starts at zero."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and (".lora_" not in name or "lora_B" in name):
                parameter += by * torch.randn(parameter.shape, generator=generator)
    return model


def trainer_of(name: str, tmp_path: Path, adapted: bool = False, **options: Any) -> Any:
    """A trainer of four rows per batch, of a model that has moved away from its reference."""
    words: dict[str, Any] = {"processing_class": tokenizer()}
    words |= (
        {"peft_config": peft.LoraConfig(task_type="SEQ_CLS" if name == "reward" else "CAUSAL_LM", **LORA)}
        if adapted
        else {}
    )
    options = {"per_device_train_batch_size": 4, **options}
    # KTO's finds all texts unlikely, so that the divergence is estimated above zero
    reference = {} if adapted else {"ref_model": moved(llama(), 1.0) if name == "kto" else llama()}
    if name == "dpo":
        made = arguments(tmp_path, trl.DPOConfig, **options)
        trainer = trl.DPOTrainer(llama(), args=made, train_dataset=pairs(), **reference, **words)
    elif name == "reward":
        made = arguments(tmp_path, trl.RewardConfig, **options)
        trainer = trl.RewardTrainer(scorer(), args=made, train_dataset=pairs(), **words)
    elif name == "kto":
        made = arguments(
            tmp_path, trl.KTOConfig, undesirable_weight=0.7, train_sampling_strategy="sequential", **options
        )
        trainer = trl.KTOTrainer(llama(), args=made, train_dataset=unpaired(), **reference, **words)
    elif name == "orpo":
        made = arguments(tmp_path, orpo.ORPOConfig, max_length=64, **options)
        trainer = orpo.ORPOTrainer(llama(), args=made, train_dataset=pairs(), **words)
    else:
        made = arguments(tmp_path, trl.GRPOConfig, num_generations=2, temperature=0.8, **options)
        rewards = [lambda completions, **_: [0.0] * len(completions)]
        prompts = Dataset.from_dict(texts(6, "prompt"))
        trainer = trl.GRPOTrainer(llama(), rewards, args=made, train_dataset=prompts, **words)
    moved(trainer.model).eval()
    return trainer


def attributor_of(trainer: Any, tmp_path: Path, **options: Any) -> TrakAttributor:
    config = TrakConfig(
        output_dir=str(tmp_path / "trak"), proj_dim=64, use_cpu=True, per_device_batch_size=4, budget="fast"
    )
    return TrakAttributor.from_trainer(trainer, config, **options)


def loss_gradients(attributor: TrakAttributor, rows: list[int]) -> dict[str, Tensor]:
    """q ∇f of some rows in one batch, by the engine and the batches of an attribution."""
    task: Any = attributor.task
    task.bind(attributor.model)
    batch = attributor.features.featurizer().batches(attributor.train_dataset).collated(rows)
    gradients = per_sample_gradients(attributor.model, batch, task)
    with torch.no_grad():
        q = task.out_to_loss_grad(attributor.model(**task.model_inputs(batch)[1]), batch)
    return {name: q.view(-1, *[1] * (g.ndim - 1)) * g for name, g in gradients.items()}


def gradients_of(trainer: Any, batch: Any, scale: float = 1.0) -> dict[str, Tensor]:
    wanted = {name: p for name, p in trainer.model.named_parameters() if p.requires_grad}
    loss = trainer.compute_loss(trainer.model, batch)
    found = torch.autograd.grad(loss * scale, list(wanted.values()), allow_unused=True)
    return {n: torch.zeros_like(p) if g is None else g for (n, p), g in zip(wanted.items(), found, strict=True)}


def assert_same(left: dict[str, Tensor], right: dict[str, Tensor], tolerance: float = 1e-5) -> None:
    difference = sum((left[name] - right[name]).square().sum() for name in right)
    norm = sum(gradient.square().sum() for gradient in right.values())
    assert norm > 0 and difference.sqrt() <= tolerance * norm.sqrt()  # type: ignore[union-attr]


@pytest.mark.few(2)
@pytest.mark.parametrize("adapted", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("name", ["dpo", "reward", "orpo"])
def test_rows_have_the_gradient_of_the_trainers_loss(name: str, adapted: bool, tmp_path: Path) -> None:
    """Padded in a batch against the trainer's own loss of each row, collated alone."""
    trainer = trainer_of(name, tmp_path, adapted)
    attributor = attributor_of(trainer, tmp_path)
    found = loss_gradients(attributor, [0, 1, 2, 3, 4, 5])
    for row in range(6):
        alone = trainer.data_collator([trainer.train_dataset[row]])
        expected = gradients_of(trainer, alone, -1.0)
        assert_same({parameter: gradient[row] for parameter, gradient in found.items()}, expected)


@pytest.mark.few(2)
@pytest.mark.parametrize("loss", [["ipo"], ["hinge"], ["robust"], ["sigmoid_norm"]], ids=lambda loss: loss[0])
def test_other_losses_of_dpo(loss: list[str], tmp_path: Path) -> None:
    trainer = trainer_of("dpo", tmp_path, loss_type=loss, label_smoothing=0.1, beta=0.05)
    found = loss_gradients(attributor_of(trainer, tmp_path), [0, 1])
    for row in range(2):
        expected = gradients_of(trainer, trainer.data_collator([trainer.train_dataset[row]]), -1.0)
        assert_same({parameter: gradient[row] for parameter, gradient in found.items()}, expected)


@pytest.mark.parametrize("adapted", [False, True], ids=["full", "lora"])
def test_kto_with_the_reference_point_of_a_batch(adapted: bool, tmp_path: Path) -> None:
    """The trainer estimates z₀ from its batch, and the task from rows: here from the same ones."""
    trainer = trainer_of("kto", tmp_path, adapted)
    attributor = attributor_of(trainer, tmp_path)
    task: Any = attributor.task
    assert isinstance(task, KTOModelOutput) and task.undesirable_weight == 0.7
    batches = attributor.features.featurizer().batches(attributor.train_dataset)
    task.prepare(attributor.model, [batches.collated([0, 1, 2, 3])])
    assert task.references()["kl"] > 0
    found = loss_gradients(attributor, [0, 1, 2, 3])
    batch = trainer.data_collator([trainer.train_dataset[row] for row in range(4)])
    assert_same({name: gradient.mean(0) for name, gradient in found.items()}, gradients_of(trainer, batch, -1.0))


def changed(name: str, tmp_path: Path) -> Any:
    """A trainer whose loss is not that of its class in TRL."""
    trainer = trainer_of("orpo" if name == "experts of orpo" else "dpo", tmp_path)
    if name == "a method":

        class Penalized(trl.DPOTrainer):  # type: ignore[misc]  # of a module without types
            def _compute_loss(self, model: Any, *rest: Any) -> Any:
                return super()._compute_loss(model, *rest) + sum(p.square().sum() for p in model.parameters())

        trainer.__class__ = Penalized
    elif name == "a class of the same name":
        trainer.__class__ = type("DPOTrainer", (trl.DPOTrainer,), {"compute_loss": lambda self, *_, **__: None})
    else:
        torch.manual_seed(0)
        sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
        made = MixtralForCausalLM(MixtralConfig(vocab_size=llama().config.vocab_size, num_key_value_heads=2, **sizes))
        trainer.model = made.eval()
        made.config.output_router_logits, trainer.aux_loss_enabled = True, True
        trainer.aux_loss_coef = trainer.router_aux_loss_coef = 5.0
    return trainer


@pytest.mark.parametrize("name", ["a method", "a class of the same name", "experts"])
def test_another_loss_than_that_of_the_class_is_refused(name: str, tmp_path: Path) -> None:
    said = {
        "a method": r"Penalized does not .*it overrides `changed.<locals>.Penalized._compute_loss`",
        "a class of the same name": "DPOTrainer overrides `compute_loss`",
        "experts": "it adds the loss of the router of experts",
    }[name]
    with pytest.raises(ValueError, match=rf"{said}.*Pass `task=DPOModelOutput\(...\)`"):
        attributor_of(changed(name, tmp_path), tmp_path)


@pytest.mark.slow
def test_the_loss_of_the_router_is_part_of_the_loss_of_orpo(tmp_path: Path) -> None:
    trainer = changed("experts of orpo", tmp_path)
    config = TrakConfig(str(tmp_path / "trak"), proj_type="none", feature_dtype="float32", use_cpu=True)
    (shard,) = TrakAttributor.from_trainer(trainer, config).featurize().features.store.train(0)
    for row, found in enumerate(shard.grads):
        expected = gradients_of(trainer, trainer.data_collator([trainer.train_dataset[row]]), -1.0)
        assert_same({"all": found}, {"all": torch.cat([one.flatten() for one in expected.values()])})
    with pytest.raises(TypeError, match="depends on 0 outputs of the model for a row"):
        attributor_of(trainer, tmp_path / "other", task="gauss_newton").featurize()


@pytest.mark.few(2)
@pytest.mark.parametrize("name", ["dpo", "reward", "kto", "orpo"])
def test_the_task_loss_is_the_loss_of_the_trainer(name: str, tmp_path: Path) -> None:
    """The features of the task `loss` are those of the task of the trainer, times q."""
    trainer = trainer_of(name, tmp_path)
    found = []
    for task in (None, "loss"):
        config = TrakConfig(str(tmp_path / f"trak-{task}"), proj_type="none", feature_dtype="float32", use_cpu=True)
        (shard,) = TrakAttributor.from_trainer(trainer, config, task=task).featurize().features.store.train(0)
        found.append({"all": shard.grads * shard.out_to_loss[:, None]})
    assert_same(found[1], found[0])
    if name in ("dpo", "reward"):
        with pytest.raises(ValueError, match="does not take rows one at a time, and `trainer_loss` is asked for"):
            attributor_of(trainer, tmp_path, task="trainer_loss")


def rollouts() -> Dataset:
    columns = {**texts(6, "prompt"), **texts(6, "completion", 1)}
    return Dataset.from_dict({**columns, "advantage": [1.0, -0.5, 0.25, 2.0, -1.0, 0.75]})


def grpo_inputs(trainer: Any, row: dict[str, Any]) -> dict[str, Any]:
    made = {
        "prompt_ids": torch.tensor([row["prompt_ids"]]),
        "completion_ids": torch.tensor([row["completion_ids"]]),
        "advantages": torch.tensor(row["advantage"])[None],
        "num_items_in_batch": torch.tensor(len(row["completion_ids"])),
    }
    made |= {f"{name}_mask": torch.ones_like(made[f"{name}_ids"]) for name in ("prompt", "completion")}
    for name, kept in (("old_logps", "old_per_token_logps"), ("ref_logps", "ref_per_token_logps")):
        if name in row:
            made[kept] = torch.tensor([row[name]])
    return made


@pytest.mark.few(2)
@pytest.mark.parametrize("adapted", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("loss", ["grpo", "dapo"])
def test_rollouts_have_the_gradient_of_the_loss_of_grpo(loss: str, adapted: bool, tmp_path: Path) -> None:
    trainer = trainer_of("grpo", tmp_path, adapted, loss_type=loss)
    attributor = attributor_of(trainer, tmp_path, train_dataset=rollouts())
    assert isinstance(attributor.task, GRPOModelOutput) and attributor.task.temperature == 0.8
    found = loss_gradients(attributor, list(range(6)))
    for row in range(6):
        given = attributor.train_dataset[row]
        assert given["completion_ids"][-1] == trainer.processing_class.eos_token_id
        scale = 1.0 if loss == "grpo" else float(len(given["completion_ids"]))
        expected = gradients_of(trainer, grpo_inputs(trainer, given), -scale)
        assert_same({parameter: gradient[row] for parameter, gradient in found.items()}, expected)


@pytest.mark.parametrize("weighted", [False, True])
def test_a_policy_that_has_moved(weighted: bool, tmp_path: Path) -> None:
    """Clipped ratios, advantages per token and a penalty for leaving the reference."""
    trainer = trainer_of("grpo", tmp_path, loss_type="grpo", epsilon_high=0.3, use_bias_correction_kl=weighted)
    trainer.beta = 0.05  # whose reference the trainer would download
    generator = torch.Generator().manual_seed(3)
    rows = []
    for row in prepared_rows(trainer, rollouts()):
        count = len(row["completion_ids"])
        numbers = torch.randn(3, count, generator=generator)
        near = -3 + 0.4 * numbers[1:]
        rows.append(
            {**row, "advantage": numbers[0].tolist(), "old_logps": near[0].tolist(), "ref_logps": near[1].tolist()}
        )
    attributor = attributor_of(trainer, tmp_path, train_dataset=Dataset.from_list(rows))
    assert isinstance(attributor.task, PPOModelOutput) and attributor.task.epsilon_high == 0.3
    found = loss_gradients(attributor, list(range(6)))
    for row in range(6):
        expected = gradients_of(trainer, grpo_inputs(trainer, rows[row]), -1.0)
        assert_same({parameter: gradient[row] for parameter, gradient in found.items()}, expected)


@pytest.mark.few(2)
@pytest.mark.parametrize("adapted", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("name", ["dpo", "kto"])
def test_references_are_those_that_the_trainer_computes(name: str, adapted: bool, tmp_path: Path) -> None:
    columns = {"dpo": ["ref_chosen_logps", "ref_rejected_logps"], "kto": ["ref_logps", "ref_KL_logps"]}[name]
    trainer = trainer_of(name, tmp_path, adapted)
    assert not set(columns) & set(trainer.train_dataset.column_names)
    training = trainer.model.train().training
    found = attributor_of(trainer, tmp_path).train_dataset
    assert trainer.model.training == training
    moved(trainer.model, -0.3)  # which is the reference again, as at the start
    for other in (trainer_of(name, tmp_path, adapted, precompute_ref_log_probs=True),):
        for column in columns:
            torch.testing.assert_close(
                torch.tensor(found[column][:]), torch.tensor(other.train_dataset[column][:]), rtol=1e-5, atol=1e-5
            )
        assert attributor_of(other, tmp_path).train_dataset is other.train_dataset


def test_references_are_computed_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trainer = trainer_of("dpo", tmp_path, True)
    with caplog.at_level(logging.INFO, logger="hf_trak"):
        first = attributor_of(trainer, tmp_path).train_dataset
        moved(trainer.model)  # the adapter, not the reference
        second = attributor_of(trainer, tmp_path).train_dataset
    assert caplog.text.count("under the reference model") == 1
    assert first["ref_chosen_logps"][:] == second["ref_chosen_logps"][:]
    (kept,) = (tmp_path / "trak" / DIRECTORY).iterdir()
    assert json.loads(kept.read_text())["ref_chosen_logps"] == first["ref_chosen_logps"][:]
    with torch.no_grad():
        trainer.model.get_base_model().model.embed_tokens.weight.mul_(1.1)
    third = attributor_of(trainer, tmp_path).train_dataset
    assert third["ref_chosen_logps"][:] != first["ref_chosen_logps"][:]


def test_an_adapter_called_ref_is_the_reference(tmp_path: Path) -> None:
    trainer = trainer_of("dpo", tmp_path, True)
    plain = attributor_of(trainer, tmp_path / "plain").train_dataset
    trainer.model.add_adapter("ref", peft.LoraConfig(task_type="CAUSAL_LM", **LORA))
    with torch.no_grad():
        for name, parameter in trainer.model.named_parameters():
            if "lora_B.ref" in name:
                parameter += 0.3
    flags = [p.requires_grad for p in trainer.model.parameters()]
    other = attributor_of(trainer, tmp_path / "other").train_dataset
    assert trainer.model.active_adapter == "default"
    assert flags == [p.requires_grad for p in trainer.model.parameters()]
    with torch.no_grad():
        expected = trainer.compute_ref_log_probs(trainer.model, trainer.data_collator(list(trainer.train_dataset)))
    torch.testing.assert_close(torch.tensor(other["ref_chosen_logps"][:]), expected[0], rtol=1e-5, atol=1e-5)
    assert other["ref_chosen_logps"][:] != plain["ref_chosen_logps"][:]


def test_a_reference_that_is_gone(tmp_path: Path) -> None:
    trainer = trainer_of("dpo", tmp_path)
    trainer.ref_model = None
    with pytest.raises(ValueError, match=r"holds no such model.*`precompute_ref_log_probs=True`"):
        attributor_of(trainer, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dpo", "reward", "kto", "orpo", "grpo"])
def test_rows_find_themselves_as_targets_of_text(name: str, tmp_path: Path) -> None:
    """Targets are rows as people have them, which the trainer prepares."""
    trainer = trainer_of(name, tmp_path)
    options = {"train_dataset": rollouts()} if name == "grpo" else {}
    attributor = attributor_of(trainer, tmp_path, **options).featurize()
    raw = {"kto": unpaired(), "grpo": rollouts().remove_columns("advantage")}.get(name, pairs())
    scored = attributor.attribute(raw.select([1, 4]), top_k=1)
    prepared = attributor.attribute(prepared_rows(trainer, raw).select([1, 4]), top_k=1)
    assert scored["trak_scores"][:] == prepared["trak_scores"][:]
    assert "chosen_ids" not in scored.column_names
    scores = attributor.attribute(raw.select([1, 4]), top_k=None)["trak_scores"][:]
    q = torch.tensor([1.0, -0.5, 0.25, 2.0, -1.0, 0.75] if name == "grpo" else [1.0] * 6)
    if name == "orpo":  # whose targets are no losses
        return
    largest = [(torch.tensor(row) / q).argmax().item() for row in scores]
    assert largest == [1, 4]


def test_chats_are_prepared_by_the_template(tmp_path: Path) -> None:
    trainer = trainer_of("grpo", tmp_path)
    trainer.processing_class.chat_template = CHAT
    rows = Dataset.from_list(
        [
            {
                "prompt": [{"role": "user", "content": "the cat"}],
                "completion": [{"role": "assistant", "content": "sat on"}],
                "advantage": 1.0,
            }
        ]
    )
    (row,) = prepared_rows(trainer, rows)
    words = trainer.processing_class.convert_ids_to_tokens(row["prompt_ids"] + row["completion_ids"])
    assert words == ["the", "cat", "sat", "on"] and len(row["prompt_ids"]) == 2


def test_rows_that_cannot_be_prepared(tmp_path: Path) -> None:
    trainer = trainer_of("dpo", tmp_path, max_length=8)
    with pytest.raises(ValueError, match=r"neither \['rejected'\] nor \['chosen_ids', 'rejected_ids'\]"):
        prepared_rows(trainer, pairs().remove_columns("rejected"))
    long = Dataset.from_dict({"prompt": [" ".join(WORDS)], "chosen": [" the"], "rejected": [" a"]})
    with pytest.raises(ValueError, match="makes 0 rows of 1"):
        prepared_rows(trainer, long)
    with pytest.raises(ValueError, match="Expected a trainer of preferences"):
        prepared_rows(object(), long)
    with pytest.raises(ValueError, match=r"prompts, and no rollouts.*`train_dataset=rollouts`"):
        attributor_of(trainer_of("grpo", tmp_path), tmp_path)
    assert kind_of(object()) is None and kind_of(trainer) == "DPOTrainer"


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("dpo", {"loss_type": ["apo_zero"]}, r"`loss_types` of the DPOTrainer is \['apo_zero'\]"),
        ("dpo", {"loss_type": ["sigmoid", "sft"]}, "Expected a single loss"),
        ("dpo", {"ld_alpha": 0.5}, "`ld_alpha` of the DPOTrainer is 0.5"),
        ("dpo", {"f_divergence_type": "forward_kl"}, "`f_divergence_type`"),
        ("grpo", {"loss_type": "cispo"}, "`loss_type` of the GRPOTrainer is 'cispo'"),
    ],
)
def test_losses_without_a_task_are_refused(name: str, options: dict[str, Any], message: str, tmp_path: Path) -> None:
    trainer = trainer_of(name, tmp_path, **options)
    given = {"train_dataset": rollouts()} if name == "grpo" else {}
    with pytest.raises(ValueError, match=message):
        attributor_of(trainer, tmp_path, **given)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dpo", "kto"])
def test_runs_without_a_record_are_replayed(name: str, tmp_path: Path) -> None:
    """Their `compute_loss` takes other batches than the task."""
    trainer = trainer_of(name, tmp_path, save_strategy="no", num_train_epochs=1, learning_rate=1e-3)
    trainer.model.save_pretrained(tmp_path / "start")
    trainer.train()
    method = Replay(of="run", start=str(tmp_path / "start"))
    targets = pairs(2, 9) if name == "dpo" else unpaired(2, 9)
    found = attributor_of(trainer, tmp_path).attribute(targets, top_k=None, method=method)
    scores = torch.tensor(found["trak_scores"])
    assert bool(torch.isfinite(scores).all()) and bool(scores.any())


@pytest.mark.slow
def test_a_loss_that_logs_while_it_is_computed_stays_the_same_task(tmp_path: Path) -> None:
    """CPO's collects metrics of every batch in the trainer, also those of a training."""
    cpo = pytest.importorskip("trl.experimental.cpo")
    made = arguments(tmp_path, cpo.CPOConfig, per_device_train_batch_size=4, max_length=64, max_steps=2)

    def run() -> Any:
        return cpo.CPOTrainer(llama(), args=made, train_dataset=pairs(), processing_class=tokenizer())

    trainer = run()
    trainer.train()
    attributor = attributor_of(trainer, tmp_path).featurize()
    found = attributor.attribute(trainer.train_dataset.select([0, 3]), top_k=2, method="index")
    assert torch.tensor(found["trak_scores"][:]).isfinite().all()
    again = run()
    again.model.load_state_dict(trainer.model.state_dict())
    later = attributor_of(again, tmp_path / "later")
    assert later.features.store_config()["task"] == attributor.features.store_config()["task"]
