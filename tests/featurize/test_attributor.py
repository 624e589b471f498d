"""TrakAttributor end to end, on real digits and real Trainer runs, against the formula of the paper."""

import copy
import hashlib
import inspect
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from datasets import Dataset, DatasetDict, List, load_from_disk
from digit_models import DigitNet
from sklearn.datasets import load_digits
from torch import Tensor, nn
from trak_options import relative_ridge, trak_config
from transformers import CLIPConfig, CLIPModel, Trainer, TrainingArguments
from transformers.modeling_outputs import ImageClassifierOutput

from hf_trak import Index, TrakAttributor, TrakConfig
from hf_trak.errors import (
    CheckpointMismatchError,
    ConfigMismatchError,
    IncompleteStoreError,
    NonFiniteError,
    StoreError,
)
from hf_trak.featurize.featurizer import Featurizer
from hf_trak.modelout_functions import CLIPModelOutput

N_TRAIN, N_EVAL = 61, 7


def digits(start: int, stop: int) -> Dataset:
    data = load_digits()
    rows = {"pixel_values": data.images[start:stop] / 16.0, "labels": data.target[start:stop], "name": None}
    rows["name"] = [f"digit {i}" for i in range(start, stop)]
    return Dataset.from_dict(rows)


def train_rows() -> Dataset:
    return digits(0, N_TRAIN)


def eval_rows() -> Dataset:
    return digits(1000, 1000 + N_EVAL)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[DigitNet, list[Path], Trainer]:
    """A real Trainer run that saves three checkpoints."""
    directory = tmp_path_factory.mktemp("run")
    torch.manual_seed(0)
    arguments = TrainingArguments(
        output_dir=str(directory),
        num_train_epochs=9,
        per_device_train_batch_size=16,
        learning_rate=1e-2,
        save_strategy="steps",
        save_steps=12,
        report_to="none",
        use_cpu=True,
        seed=1,
    )
    trainer = Trainer(model=DigitNet(), args=arguments, train_dataset=train_rows())
    trainer.train()
    checkpoints = sorted(directory.glob("checkpoint-*"), key=lambda path: int(path.name.split("-")[1]))
    assert len(checkpoints) == 3
    return trainer.model, checkpoints, trainer


def copy_of(model: nn.Module) -> DigitNet:
    fresh = DigitNet()
    fresh.load_state_dict(model.state_dict())
    return fresh


def make(model: nn.Module, directory: Path, train_dataset: Any = None, **options: Any) -> TrakAttributor:
    defaults = {"proj_type": "sjlt", "proj_dim": 64, "shard_size": 16, "per_device_batch_size": 5}
    config = trak_config(output_dir=str(directory), use_cpu=True, **{**defaults, **options})
    rows = train_rows() if train_dataset is None else train_dataset
    return TrakAttributor(model, config, train_dataset=rows, task="image_classification")


def full(attributor: TrakAttributor, rows: Dataset | None = None, **options: Any) -> np.ndarray:
    """All scores, `(n_train, n_targets)`."""
    scored = attributor.attribute(eval_rows() if rows is None else rows, top_k=None, **options)
    return np.stack(scored.with_format("numpy")["trak_scores"][:]).T


def contents(directory: Path) -> dict[str, str]:
    """Digest of every file below a directory."""
    return {
        str(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }


def features(directory: Path) -> dict[str, str]:
    return {name: digest for name, digest in contents(directory).items() if name.endswith(".safetensors")}


def gradients64(model: DigitNet, rows: Dataset) -> tuple[Tensor, Tensor]:
    """∂f/∂θ of the margin of every row, one at a time in float64, and 1 − p."""
    model = copy_of(model).double().eval()
    grads, weights = [], []
    for row in rows:
        logits = model(torch.tensor(row["pixel_values"], dtype=torch.float64)[None]).logits[0]
        others = torch.cat([logits[: row["labels"]], logits[row["labels"] + 1 :]])
        margin = logits[row["labels"]] - others.logsumexp(0)
        grads.append(torch.cat([g.flatten() for g in torch.autograd.grad(margin, list(model.parameters()))]))
        weights.append(1 - logits.softmax(0)[row["labels"]].detach())
    return torch.stack(grads), torch.stack(weights)


def closed_form(models: list[DigitNet], relative: float, absolute: float | None = None) -> np.ndarray:
    """τ = mean_c X_c (X_cᵀX_c + λ_c I)⁻¹ t_cᵀ ∘ mean_c q_c, in float64, with λ relative to trace / min(n, k)."""
    product, weight = 0, 0
    for model in models:
        x, q = gradients64(model, train_rows())
        t, _ = gradients64(model, eval_rows())
        gram = x.T @ x
        lam = relative * gram.trace() / min(x.shape) if absolute is None else absolute
        eye = torch.eye(len(gram), dtype=torch.float64)
        product = product + x @ torch.linalg.solve(gram + lam * eye, t.T) / len(models)
        weight = weight + q / len(models)
    return (product * weight[:, None]).numpy()


def relative_error(got: np.ndarray, expected: np.ndarray) -> float:
    return float(np.linalg.norm(got - expected) / np.linalg.norm(expected))


def at_checkpoint(model: nn.Module, path: Path) -> DigitNet:
    from safetensors.torch import load_file

    fresh = DigitNet()
    fresh.load_state_dict(load_file(path / "model.safetensors"))
    return fresh


# -- the formula -----------------------------------------------------------------------------------------------------


@pytest.mark.few(1)
@pytest.mark.parametrize("engine", ["auto", "functional", "iterative"])
def test_identity_projection_is_the_formula_of_the_paper(trained: Any, tmp_path: Path, engine: str) -> None:
    model, checkpoints, _ = trained
    attributor = make(copy_of(model), tmp_path, proj_type="none", engine=engine, lambda_relative=0.1)
    attributor.featurize(checkpoints)
    expected = closed_form([at_checkpoint(model, path) for path in checkpoints], relative=0.1)
    assert relative_error(full(attributor), expected) < 1e-4


@pytest.mark.slow
def test_absolute_lambda(trained: Any, tmp_path: Path) -> None:
    model, _, _ = trained
    attributor = make(copy_of(model), tmp_path, proj_type="none").featurize()
    attributor.features.args = replace(attributor.args, lambda_relative=relative_ridge(attributor, 3.0))
    assert relative_error(full(attributor), closed_form([model], 0.0, absolute=3.0)) < 1e-4


@pytest.mark.slow
def test_mean_of_products_times_mean_of_weights(trained: Any, tmp_path: Path) -> None:
    """The ensemble is not the mean of the checkpoints' own scores."""
    model, checkpoints, _ = trained
    attributor = make(copy_of(model), tmp_path, proj_type="none").featurize(checkpoints)
    single = np.mean([full(attributor, checkpoints=[i], name=f"only-{i}") for i in range(3)], axis=0)
    assert relative_error(single, full(attributor)) > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("projection", ["sjlt", "rademacher", "normal"])
def test_random_projections_preserve_the_scores(trained: Any, tmp_path: Path, projection: str) -> None:
    """At k ≫ n the random maps keep the Gram matrix of 61 gradients, hence the ranking."""
    model, _, _ = trained
    attributor = make(copy_of(model), tmp_path, proj_type=projection, proj_dim=1500, lambda_relative=0.3).featurize()
    expected = closed_form([model], relative=0.3)
    assert np.corrcoef(full(attributor).ravel(), expected.ravel())[0, 1] > 0.93


# -- resume, batch boundaries, re-scoring ----------------------------------------------------------------------------


@pytest.mark.slow
def test_resumed_run_is_byte_identical(trained: Any, tmp_path: Path) -> None:
    model, checkpoints, _ = trained
    whole = make(copy_of(model), tmp_path / "whole").featurize(checkpoints[:2])
    part = make(copy_of(model), tmp_path / "part").featurize(checkpoints[:2])
    expected = full(whole)
    assert np.array_equal(full(part), expected)
    for name in ("checkpoint-0/train-00001-of-00004", "checkpoint-1/train-00003-of-00004", "checkpoint-1/gram"):
        (tmp_path / "part" / f"{name}.safetensors").unlink()
    again = make(copy_of(model), tmp_path / "part").featurize(checkpoints[:2])
    assert features(tmp_path / "part") == features(tmp_path / "whole")
    assert np.array_equal(full(again), expected)


def test_finished_shards_are_not_computed_again(trained: Any, tmp_path: Path, monkeypatch: Any) -> None:
    model, _, _ = trained
    make(copy_of(model), tmp_path).featurize()
    calls: list[int] = []
    features_of = Featurizer.features_of
    monkeypatch.setattr(Featurizer, "features_of", lambda *args: (calls.append(1), features_of(*args))[1])
    attributor = make(copy_of(model), tmp_path).featurize()
    assert calls == []
    first = full(attributor)
    assert calls
    calls.clear()
    assert np.array_equal(full(attributor), first)
    assert calls == []


@pytest.mark.slow
@pytest.mark.parametrize("batch_size", [1, 3, 64])
def test_batch_boundaries_change_rounding_only(trained: Any, tmp_path: Path, batch_size: int) -> None:
    """Neither the size nor the company of a batch enters a sample's features."""
    model, _, _ = trained
    reference = make(copy_of(model), tmp_path / "5").featurize()
    other = make(copy_of(model), tmp_path / "other", per_device_batch_size=batch_size).featurize()
    left = torch.cat([shard.grads for shard in reference.features.store.train(0)])
    right = torch.cat([shard.grads for shard in other.features.store.train(0)])
    assert ((left - right).norm(dim=1) / left.norm(dim=1)).max() < 1e-5
    assert relative_error(full(other), full(reference)) < 1e-5


# -- results as datasets ---------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_top_k_is_the_head_and_tail_of_the_full_matrix(trained: Any, tmp_path: Path) -> None:
    model, _, _ = trained
    attributor = make(copy_of(model), tmp_path).featurize()
    scores = full(attributor)
    for per, matrix, rows in (("target", scores.T, eval_rows()), ("train", scores, train_rows())):
        top = attributor.attribute(eval_rows(), top_k=5, per=per)
        assert top.column_names == [*rows.column_names, "trak_indices", "trak_scores", *top.column_names[-2:]]
        assert top["name"][:] == rows["name"][:]
        assert isinstance(top.features["trak_indices"], List) and top.features["trak_indices"].length == 5
        order = np.argsort(-matrix, axis=1, kind="stable")
        assert top["trak_indices"][:] == order[:, :5].tolist()
        assert np.allclose(top["trak_scores"][:], np.take_along_axis(matrix, order[:, :5], 1), rtol=1e-5)
        worst = np.argsort(matrix, axis=1, kind="stable")[:, :5]
        assert top["trak_harmful_indices"][:] == worst.tolist()
    by_train = attributor.attribute(eval_rows(), top_k=None, per="train")
    assert np.allclose(np.stack(by_train.with_format("numpy")["trak_scores"][:]), scores, rtol=1e-6)


def test_full_scores_are_a_memory_mapped_fixed_size_list(trained: Any, tmp_path: Path) -> None:
    model, _, _ = trained
    scored = make(copy_of(model), tmp_path).featurize().attribute(eval_rows(), top_k=None, name="exam")
    assert scored.features["trak_scores"].length == N_TRAIN
    assert scored.features["trak_scores"].feature.dtype == "float32"
    (file,) = (tmp_path / "scores" / "exam").iterdir()
    assert re.fullmatch("per-target-[0-9a-f]{32}.arrow", file.name)
    column = scored.data.column("trak_scores").chunk(0)
    assert isinstance(column, pa.FixedSizeListArray)
    scored.save_to_disk(str(tmp_path / "saved"))
    assert load_from_disk(str(tmp_path / "saved")).to_dict() == scored.to_dict()


def test_top_k_longer_than_the_dataset_and_repeated_attribution(trained: Any, tmp_path: Path) -> None:
    model, _, _ = trained
    attributor = make(copy_of(model), tmp_path).featurize()
    scored = attributor.attribute(eval_rows(), top_k=1000)
    assert scored.features["trak_indices"].length == N_TRAIN
    again = attributor.attribute(scored, top_k=3, name="again")
    assert again.column_names == scored.column_names
    assert again["trak_indices"][:] == [row[:3] for row in scored["trak_indices"][:]]


def test_torch_datasets_and_plain_functions_work(trained: Any, tmp_path: Path) -> None:
    """A dataset of tuples, and a user's function of the model output as the task."""
    model, _, _ = trained
    rows = train_rows().with_format("torch")
    pairs = [(row["pixel_values"], row["labels"]) for row in rows]

    class PairNet(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = copy_of(model)

        def forward(self, images: Tensor) -> Tensor:
            return self.net(images).logits

    options = {"proj_type": "none", "use_cpu": True}
    pair = TrakAttributor(
        PairNet(),
        trak_config(output_dir=str(tmp_path / "pairs"), **options),
        train_dataset=pairs,
        task="image_classification",
    ).featurize()
    named = make(copy_of(model), tmp_path / "named", proj_type="none", per_device_batch_size=16).featurize()
    a = torch.cat([shard.grads for shard in pair.features.store.train(0)])
    b = torch.cat([shard.grads for shard in named.features.store.train(0)])
    assert torch.allclose(a, b, atol=1e-5)

    def top_logit(outputs: ImageClassifierOutput, batch: dict[str, Tensor]) -> Tensor:
        return outputs.logits.amax(dim=1)

    custom = TrakAttributor(
        copy_of(model),
        trak_config(output_dir=str(tmp_path / "function"), **options),
        train_dataset=train_rows(),
        task=top_logit,
    ).featurize()
    scored = custom.attribute(eval_rows(), top_k=2)
    assert len(scored["trak_indices"][0]) == 2


@pytest.mark.slow
def test_self_influence_is_the_diagonal(trained: Any, tmp_path: Path) -> None:
    model, checkpoints, _ = trained
    attributor = make(copy_of(model), tmp_path).featurize(checkpoints[:2])
    diagonal = np.diag(full(attributor, train_rows()))
    assert relative_error(attributor.self_influence().numpy(), diagonal) < 1e-4
    method = Index(lambda_relative=10.0)
    other = np.diag(full(attributor, train_rows(), method=method))
    assert relative_error(attributor.self_influence(method).numpy(), other) < 1e-4 < relative_error(other, diagonal)


@pytest.mark.slow
def test_clip_pairs_from_a_dataset(tmp_path: Path) -> None:
    """Negatives come from the training rows, the same for every batch size, embedded anew per checkpoint."""
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = CLIPConfig(
        text_config={**vision, "vocab_size": 30, "max_position_embeddings": 8, "eos_token_id": 29},
        vision_config={**vision, "image_size": 8, "patch_size": 4},
        projection_dim=8,
    )
    data = load_digits()

    def pairs(start: int, stop: int) -> Dataset:
        images = np.repeat(data.images[start:stop, None] / 16.0, 3, axis=1)
        words = [[int(label) + 1, 12, 29] for label in data.target[start:stop]]
        return Dataset.from_dict(
            {"pixel_values": images, "input_ids": words, "attention_mask": [[1] * 3] * len(words)}
        )

    torch.manual_seed(0)
    models = [CLIPModel(config), CLIPModel(config)]
    results = []
    for batch_size in (1, 8):
        arguments = TrakConfig(
            output_dir=str(tmp_path / str(batch_size)),
            proj_dim=64,
            shard_size=8,
            per_device_batch_size=batch_size,
            use_cpu=True,
        )
        task = CLIPModelOutput(simulated_batch_size=10)
        attributor = TrakAttributor(copy.deepcopy(models[0]), arguments, train_dataset=pairs(0, 20), task=task)
        attributor.featurize(models)
        first, second = (torch.cat([s.out_to_loss for s in attributor.features.store.train(i)]) for i in (0, 1))
        assert (first > 0).all() and not torch.allclose(first, second)
        results.append(full(attributor, pairs(100, 103)))
    assert results[0].shape == (20, 3)
    assert relative_error(results[0], results[1]) < 1e-4


# -- Trainer ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_from_trainer_takes_everything_and_leaves_training_untouched(trained: Any, tmp_path: Path) -> None:
    _, _, finished = trained

    def run(attribute: bool) -> list[float]:
        torch.manual_seed(3)
        arguments = TrainingArguments(
            output_dir=str(tmp_path / f"run-{attribute}"),
            max_steps=8,
            per_device_train_batch_size=8,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            use_cpu=True,
        )
        trainer = Trainer(model=DigitNet(), args=arguments, train_dataset=train_rows())
        trainer.train()
        before = {name: value.clone() for name, value in trainer.model.state_dict().items()}
        flags = [(p.requires_grad, p.grad is None) for p in trainer.model.parameters()]
        modes = [module.training for module in trainer.model.modules()]
        if attribute:
            config = TrakConfig(output_dir=str(tmp_path / "trak"), proj_dim=32, budget="fast")
            attributor = TrakAttributor.from_trainer(trainer, config, task="image_classification")
            assert attributor.model is trainer.model
            attributor.featurize().attribute(eval_rows(), top_k=2)
        assert all(torch.equal(value, before[name]) for name, value in trainer.model.state_dict().items())
        assert [(p.requires_grad, p.grad is None) for p in trainer.model.parameters()] == flags
        assert [module.training for module in trainer.model.modules()] == modes
        torch.manual_seed(4)
        trainer.train()
        return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]

    assert run(True) == run(False)
    with pytest.raises(ValueError, match="no `train_dataset`"):
        TrakAttributor.from_trainer(Trainer(model=DigitNet(), args=finished.args))


def test_the_directory_of_the_trainer_is_refused(trained: Any) -> None:
    """Its `save_total_limit` would delete the store's `checkpoint-…` directories."""
    _, _, finished = trained
    config = TrakConfig(output_dir=finished.args.output_dir + "/.")
    with pytest.raises(ValueError, match=r"`output_dir` is .*the trainer's own.*trak"):
        TrakAttributor.from_trainer(finished, config, task="image_classification")


@pytest.mark.slow
def test_current_weights_are_found_again_and_later_training_is_noticed(trained: Any, tmp_path: Path) -> None:
    """Targets are never scored with other weights than those of the features."""
    model, _, _ = trained
    net = copy_of(model)
    attributor = make(net, tmp_path).featurize()
    full(attributor)
    with torch.no_grad():
        net.head.bias += 0.1
    with pytest.raises(CheckpointMismatchError, match=r"model_id 0.*fingerprint"):
        attributor.attribute(digits(1100, 1103), top_k=2)
    with pytest.raises(CheckpointMismatchError, match="Model id 0 is tied"):
        attributor.featurize()
    assert full(make(copy_of(model), tmp_path)).shape == (N_TRAIN, N_EVAL)


@pytest.mark.slow
def test_checkpoint_paths_are_found_again_by_a_new_attributor(trained: Any, tmp_path: Path) -> None:
    model, checkpoints, _ = trained
    first = full(make(copy_of(model), tmp_path).featurize(checkpoints))
    fresh = make(DigitNet(), tmp_path)
    assert np.array_equal(full(fresh, name="fresh"), first)


@pytest.mark.slow
def test_state_dicts_in_memory_must_be_given_again(trained: Any, tmp_path: Path) -> None:
    model, checkpoints, _ = trained
    states = [at_checkpoint(model, path).state_dict() for path in checkpoints[:2]]
    first = full(make(copy_of(model), tmp_path).featurize(states))
    fresh = make(DigitNet(), tmp_path)
    with pytest.raises(CheckpointMismatchError, match="pass that checkpoint in `checkpoints=`"):
        full(fresh, name="fresh")
    assert np.array_equal(full(fresh, name="fresh", checkpoints=states), first)


# -- bad input -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("option", "value", "key"),
    [
        ("proj_dim", 65, "proj_dim"),
        ("proj_type", "rademacher", "projection"),
        ("proj_type", "sjlt-2", "proj_nonzeros"),
        ("seed", 1, "seed"),
        ("feature_dtype", "float16", "feature_dtype"),
        ("shard_size", 17, "shard_size"),
        ("grad_wrt", ["head.weight"], "parameters"),
        ("model_dtype", "bfloat16", "model_dtype"),
    ],
)
def test_another_configuration_is_refused(trained: Any, tmp_path: Path, option: str, value: object, key: str) -> None:
    """Every setting that defines the features is compared, and the store is left as it was."""
    model, _, _ = trained
    make(copy_of(model), tmp_path).featurize()
    before = contents(tmp_path)
    with pytest.raises(ConfigMismatchError, match=key):
        make(copy_of(model), tmp_path, **{option: value}).featurize()
    assert contents(tmp_path) == before


def test_another_train_set_task_or_model_is_refused(trained: Any, tmp_path: Path) -> None:
    model, _, _ = trained
    make(copy_of(model), tmp_path).featurize()
    before = contents(tmp_path)
    flipped = train_rows().map(lambda row, i: {"labels": 9 if i == 5 else row["labels"]}, with_indices=True)
    with pytest.raises(ConfigMismatchError, match="train_fingerprint"):
        make(copy_of(model), tmp_path, flipped).featurize()
    with pytest.raises(ConfigMismatchError, match="train_size"):
        make(copy_of(model), tmp_path, digits(0, 60)).featurize()
    other = make(copy_of(model), tmp_path)
    config = other.args
    with pytest.raises(ConfigMismatchError, match="task"):
        TrakAttributor(copy_of(model), config, train_dataset=train_rows(), task="loss").featurize()
    assert contents(tmp_path) == before


@pytest.mark.slow
def test_ids_top_k_per_and_names_are_checked(trained: Any, tmp_path: Path) -> None:
    model, checkpoints, _ = trained
    attributor = make(copy_of(model), tmp_path / "store")
    with pytest.raises(IncompleteStoreError, match=r"Nothing is featurized in '.*store'\. Expected .*`featurize\(\)`"):
        attributor.attribute(eval_rows())
    with pytest.raises(ValueError, match=r"`checkpoints` has the ids \[-1, 1\]"):
        attributor.featurize(dict(zip([-1, 1], checkpoints[:2], strict=True)))
    with pytest.raises(ValueError, match=r"`checkpoints` is \[0, 1\]. Expected weights"):
        attributor.featurize([0, 1])
    for nothing in ([], {}):
        with pytest.raises(ValueError, match="`checkpoints` is empty"):
            attributor.featurize(nothing)
    attributor.featurize({7: checkpoints[0]})
    before = contents(tmp_path)
    with pytest.raises(IncompleteStoreError, match=r"\[3\]; featurized in .* are \[7\]"):
        attributor.attribute(eval_rows(), checkpoints=[3])
    for top_k in (0, -1, 2.0, True):
        with pytest.raises(ValueError, match="`top_k` is"):
            attributor.attribute(eval_rows(), top_k=top_k)
    with pytest.raises(ValueError, match="`per` is 'row'"):
        attributor.attribute(eval_rows(), per="row")  # type: ignore[arg-type]
    for name in ("..", "../outside", "a/b", "", "/tmp/x", ".hidden", "a\0b", "x" * 300):
        with pytest.raises(ValueError, match=r"`name` is .*[Ee]xpected"):
            attributor.attribute(eval_rows(), name=name)
    with pytest.raises(ValueError, match="`eval_dataset` is empty"):
        attributor.attribute(eval_rows().select([]))
    assert contents(tmp_path) == before


@pytest.mark.slow
def test_experiment_with_other_targets_is_refused(trained: Any, tmp_path: Path) -> None:
    model, _, _ = trained
    attributor = make(copy_of(model), tmp_path).featurize()
    attributor.attribute(eval_rows(), name="exam")
    before = contents(tmp_path)
    with pytest.raises(ConfigMismatchError, match="num_targets"):
        attributor.attribute(digits(1000, 1009), name="exam")
    with pytest.raises(ConfigMismatchError, match="dataset_fingerprint"):
        attributor.attribute(digits(1001, 1001 + N_EVAL), name="exam")
    assert contents(tmp_path) == before


@pytest.mark.slow
def test_incomplete_checkpoints_are_not_scored(trained: Any, tmp_path: Path) -> None:
    model, checkpoints, _ = trained
    attributor = make(copy_of(model), tmp_path).featurize(checkpoints[:2])
    expected = full(attributor, checkpoints=[1], name="one")
    (tmp_path / "checkpoint-0" / "train-00002-of-00004.safetensors").unlink()
    with pytest.raises(IncompleteStoreError, match=r"1 shards of model_id 0 are missing.*featurize"):
        attributor.attribute(eval_rows())
    assert np.array_equal(full(attributor, checkpoints=[1], name="one"), expected)


@pytest.mark.parametrize("damage", ["truncate", "flip", "swap"])
def test_damaged_shards_are_named(trained: Any, tmp_path: Path, damage: str) -> None:
    model, checkpoints, _ = trained
    make(copy_of(model), tmp_path).featurize(checkpoints[:2])
    path = tmp_path / "checkpoint-0" / "train-00001-of-00004.safetensors"
    data = bytearray(path.read_bytes())
    if damage == "truncate":
        data = data[:-10]
    elif damage == "flip":
        data[-5] ^= 4
    else:
        data = bytearray((tmp_path / "checkpoint-1" / path.name).read_bytes())
    path.write_bytes(bytes(data))
    (tmp_path / "checkpoint-0" / "gram.safetensors").unlink()
    with pytest.raises(StoreError, match=r"train-00001-of-00004\.safetensors"):
        make(copy_of(model), tmp_path).featurize(checkpoints[:2])


def test_bad_rows_are_named_and_nothing_is_stored(trained: Any, tmp_path: Path) -> None:
    model, _, _ = trained

    def poison(row: dict[str, Any], i: int) -> dict[str, Any]:
        return {"pixel_values": [[float("nan")] * 8] * 8} if i == 3 else {}

    broken = train_rows().map(poison, with_indices=True)
    with pytest.raises(NonFiniteError, match="train row 3 is not finite"):
        make(copy_of(model), tmp_path / "nan", broken).featurize()
    assert features(tmp_path / "nan") == {}
    for label in (10, -1, -100):
        wrong = train_rows().map(lambda row, i, v=label: {"labels": v if i == 8 else row["labels"]}, with_indices=True)
        with pytest.raises(ValueError, match=str(label)) as info:
            make(copy_of(model), tmp_path / f"label{label}", wrong).featurize()
        assert "train rows 5 to 9" in " ".join(info.value.__notes__)
        assert features(tmp_path / f"label{label}") == {}


def test_wrong_arguments_say_what_to_do(trained: Any, tmp_path: Path) -> None:
    model, _, _ = trained
    with pytest.raises(ValueError, match=r"head\.wight.*named_parameters"):
        make(copy_of(model), tmp_path, grad_wrt=["head.wight"])
    with pytest.raises(ValueError, match="`train_dataset` is empty"):
        make(copy_of(model), tmp_path, digits(0, 0))
    with pytest.raises(TypeError, match="no length"):
        make(copy_of(model), tmp_path, train_rows().to_iterable_dataset())
    config = TrakConfig(output_dir=str(tmp_path), use_cpu=True)
    with pytest.raises(ValueError, match=r"text_clasification.*text_classification"):
        TrakAttributor(copy_of(model), config, train_dataset=train_rows(), task="text_clasification")
    with pytest.raises(ValueError, match="task"):
        TrakAttributor(copy_of(model), config, train_dataset=train_rows())

    def halve(rows: list[dict[str, Any]]) -> dict[str, Tensor]:
        return {
            "pixel_values": torch.tensor([row["pixel_values"] for row in rows[::2]], dtype=torch.float32),
            "labels": torch.tensor([row["labels"] for row in rows[::2]]),
        }

    attributor = TrakAttributor(copy_of(model), config, train_rows(), halve, task="image_classification")
    with pytest.raises(ValueError, match=r"batch of 8 samples from 16 rows"):
        attributor.featurize()
    assert features(tmp_path) == {}


@pytest.mark.slow
def test_half_precision_storage_and_compute(trained: Any, tmp_path: Path) -> None:
    model, _, _ = trained
    reference = full(make(copy_of(model), tmp_path / "32").featurize())
    for dtype, limit in (("float16", 0.01), ("bfloat16", 0.02)):
        half = make(copy_of(model), tmp_path / dtype, feature_dtype=dtype).featurize()
        assert next(iter(half.features.store.train(0))).grads.dtype == getattr(torch, dtype)
        assert 0 < relative_error(full(half), reference) < limit


@pytest.mark.slow
def test_only_the_chosen_parameters_count(trained: Any, tmp_path: Path) -> None:
    """Frozen parameters are neither counted nor projected; naming them is the same as freezing the rest."""
    model, _, _ = trained
    frozen = copy_of(model)
    frozen.body.requires_grad_(False)
    by_flag = make(frozen, tmp_path / "flag", proj_type="none").featurize()
    by_name = make(
        copy_of(model), tmp_path / "name", proj_type="none", grad_wrt=["head.bias", "head.weight"]
    ).featurize()
    assert by_flag.features.proj_dim == by_name.features.proj_dim == 26 * 10 + 10
    assert np.allclose(full(by_flag), full(by_name), rtol=1e-4, atol=1e-6)
    assert [p.requires_grad for p in frozen.parameters()] == [False, False, True, True]


@pytest.mark.slow
def test_checkpoints_that_are_not_as_many_as_the_model_ids(trained: Any, tmp_path: Path) -> None:
    model, checkpoints, _ = trained
    attributor = make(copy_of(model), tmp_path).featurize(checkpoints[:2])
    for given, says in (([checkpoints[0]], 1), (checkpoints, 3), (checkpoints[0], 1)):
        expected = rf"`checkpoints` has {says} entries for the model_ids \[0, 1\]\. Expected one for each"
        with pytest.raises(ValueError, match=expected):
            attributor.attribute(eval_rows(), checkpoints=given)
        with pytest.raises(ValueError, match=expected):
            attributor.extend(eval_rows(), checkpoints=given)
    assert not (tmp_path / "experiments").exists()


def test_arguments_of_another_kind_are_named(trained: Any, tmp_path: Path) -> None:
    model, _, trainer = trained
    rows = train_rows()
    mapping = {"output_dir": str(tmp_path)}
    with pytest.raises(TypeError, match=r"`args` is a dict, the keys \['output_dir'\].*`TrakConfig\(\*\*args\)`"):
        TrakAttributor(model, mapping, train_dataset=rows, task="image_classification")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"`args` is a dict"):
        TrakAttributor.from_trainer(trainer, mapping)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"`args` is a TrainingArguments, .*Expected a `TrakConfig`"):
        TrakAttributor(model, trainer.args, train_dataset=rows, task="image_classification")
    with pytest.raises(TypeError, match=r"`model` is 'gpt2'\. Expected .*from_pretrained"):
        TrakAttributor("gpt2", train_dataset=rows)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"`model` is a Trainer\. Expected .*from_trainer"):
        TrakAttributor(trainer, train_dataset=rows)
    with pytest.raises(TypeError, match=r"`trainer` is a DigitNet, which has no `model`, .*`TrakAttributor\(model"):
        TrakAttributor.from_trainer(model)
    attributor = make(copy_of(model), tmp_path)
    with pytest.raises(TypeError, match=r"`eval_dataset` is a DatasetDict, with the keys \['test'\]"):
        attributor.attribute(DatasetDict({"test": eval_rows()}))
    with pytest.raises(TypeError, match=r"`train_dataset` is a dict"):
        make(copy_of(model), tmp_path, {"train": rows})


def test_a_function_is_a_task_for_a_trainer_too(trained: Any, tmp_path: Path) -> None:
    _, _, trainer = trained
    for function in (TrakAttributor.from_trainer, TrakAttributor.__init__):
        assert "Callable" in str(inspect.signature(function).parameters["task"].annotation)
    config = TrakConfig(output_dir=str(tmp_path), proj_dim=16, use_cpu=True)
    attributor = TrakAttributor.from_trainer(trainer, config, lambda result, batch: result.logits[:, 0])
    assert attributor.featurize().features.store.model_ids == [0]
