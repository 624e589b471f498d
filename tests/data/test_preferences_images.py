"""TRL's trainer of DPO with a vision-language model: a row is a pair of answers about images."""

from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from torch import Tensor
from vlm_models import conversations, processor_of_words, vlm

from hf_trak import TrakAttributor, TrakConfig

trl = pytest.importorskip("trl")
peft = pytest.importorskip("peft")

BETA = 0.1
LORA = {"r": 2, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM"}


def pairs_about_images(count: int) -> Dataset:
    """Prompts with one or two images of different sizes, and two answers of different lengths."""
    rows = conversations(count).rename_column("completion", "chosen")
    said = ["nine", "eight and nine", "zero and zero and one"]
    return rows.add_column(
        "rejected",
        [[{"role": "assistant", "content": [{"type": "text", "text": said[row % 3]}]}] for row in range(count)],
    )


def trainer_of_images(tmp_path: Path, adapted: bool = False) -> Any:
    """A trainer whose model has moved away from its reference."""
    args = trl.DPOConfig(
        str(tmp_path / "out"), beta=BETA, max_length=None, use_cpu=True, bf16=False, report_to=[],
        per_device_train_batch_size=3, gradient_checkpointing=False,
    )  # fmt: skip
    model = vlm("qwen2_vl")
    model.config.pad_token_id = 0
    extra = {"peft_config": peft.LoraConfig(**LORA)} if adapted else {"ref_model": vlm("qwen2_vl")}
    trainer = trl.DPOTrainer(
        model, args=args, train_dataset=pairs_about_images(6), processing_class=processor_of_words(), **extra
    )
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in trainer.model.named_parameters():
            if parameter.requires_grad and (".lora_" not in name or "lora_B" in name):
                parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    trainer.model.eval()
    return trainer


def attributor_of(trainer: Any, directory: Path, size: int) -> TrakAttributor:
    return TrakAttributor.from_trainer(
        trainer,
        TrakConfig(
            str(directory),
            proj_type="none",
            feature_dtype="float32",
            use_cpu=True,
            per_device_batch_size=size,
            budget="fast",
        ),
    )


def answered(model: Any, batch: Any) -> Tensor:
    """Log-probabilities of the chosen and the rejected answer, `(2,)`, of one pair as TRL collates it."""
    own = {name: value for name, value in batch.items() if name != "completion_mask"}
    log_probs = model(**own).logits[:, :-1].log_softmax(-1)
    said = log_probs.gather(2, batch["input_ids"][:, 1:, None]).squeeze(2)
    return (said * batch["completion_mask"][:, 1:]).sum(1)


def by_hand(trainer: Any, row: int, names: tuple[str, ...]) -> tuple[Tensor, Tensor]:
    """Gradient and loss of one pair, collated alone."""
    batch = trainer.data_collator([dict(trainer.train_dataset[row])])
    own = answered(trainer.model, batch)
    with torch.no_grad():
        if trainer.ref_model is None:
            with trainer.model.disable_adapter():
                reference = answered(trainer.model, batch)
        else:
            reference = answered(trainer.ref_model, batch)
    margin = BETA * ((own[0] - own[1]) - (reference[0] - reference[1]))
    loss = -torch.nn.functional.logsigmoid(margin)
    parameters = dict(trainer.model.named_parameters())
    found = torch.autograd.grad(loss, [parameters[name] for name in names], allow_unused=True, materialize_grads=True)
    return torch.cat([one.flatten() for one in found]), loss.detach()


@pytest.mark.few(1)
@pytest.mark.parametrize("adapted", [False, True])
def test_rows_are_the_loss_of_pairs_collated_alone(adapted: bool, tmp_path: Path) -> None:
    trainer = trainer_of_images(tmp_path, adapted)
    own = attributor_of(trainer, tmp_path / "trak", 4)
    own.featurize()
    shards = list(own.features.store.train(0))
    features = torch.cat([torch.as_tensor(shard.grads) for shard in shards])
    q = torch.cat([torch.as_tensor(shard.out_to_loss) for shard in shards]).view(-1, 1)
    for row in range(6):
        expected, loss = by_hand(trainer, row, tuple(own.features.layout.names))
        assert (1 - q[row] - torch.exp(-loss)).abs() < 1e-5  # q = 1 − σ(h), with the reference
        assert (-q[row] * features[row] - expected).norm() <= 1e-5 * expected.norm()


@pytest.mark.slow
def test_batches_of_different_images_are_batches_of_one(tmp_path: Path) -> None:
    trainer = trainer_of_images(tmp_path)
    found = []
    for size in (1, 6):
        own = attributor_of(trainer, tmp_path / f"trak-{size}", size)
        own.featurize()
        found.append(torch.cat([torch.as_tensor(shard.grads) for shard in own.features.store.train(0)]))
    assert ((found[0] - found[1]).norm(dim=1) <= 1e-5 * found[0].norm(dim=1)).all()


@pytest.mark.slow
def test_targets_are_pairs_as_the_trainer_takes_them(tmp_path: Path) -> None:
    own = attributor_of(trainer_of_images(tmp_path), tmp_path / "trak", 4)
    own.featurize()
    targets = pairs_about_images(2)
    assert len(own.attribute(targets, top_k=2)[0]["trak_indices"]) == 2
