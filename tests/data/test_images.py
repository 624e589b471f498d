"""Rows of images and text: batches of images of different sizes and numbers give what each row gives alone."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset as TorchDataset
from trak_options import trak_config
from vlm_models import IMAGE, conversations, image_rows, processor_of_words, vlm, vlm_collator

from hf_trak import TrakAttributor
from hf_trak.data.images import ImageTokens, SplitRows, image_sizes, split_at_images
from hf_trak.evaluation.trial_steps import TrialSteps, most_similar
from hf_trak.modelout_functions import get_task
from hf_trak.modelout_functions.base import STACKED

GROUPS = [[0], [1, 4], [2, 5], [3]]
"""Rows whose images have the same sizes."""
QUICK: dict[str, Any] = {"use_cpu": True}
KINDS = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "llava", "paligemma", "gemma3", "smolvlm")


class Rows(TorchDataset):
    """Rows whose images stay arrays."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, row: int) -> dict[str, Any]:
        return self.rows[row]


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def attributor(kind: str, model: nn.Module, directory: Path, size: int, **options: Any) -> TrakAttributor:
    config = trak_config(
        str(directory), per_device_batch_size=size, remove_unused_columns=False,
        **{"proj_type": "none", "feature_dtype": "float32", **QUICK, **options},
    )  # fmt: skip
    rows = Rows(image_rows(kind))
    return TrakAttributor(model, config, train_dataset=rows, data_collator=vlm_collator(kind), task="causal_lm")


def features(own: TrakAttributor) -> Tensor:
    return torch.cat([shard.grads for shard in own.featurize().features.store.train(0)])


def plain(kind: str, model: nn.Module) -> Tensor:
    """Gradients by autograd of every row collated alone, as the collator lays it out."""
    task, found = get_task("causal_lm"), []
    for row in image_rows(kind):
        batch = vlm_collator(kind)([row])
        given = {name: value for name, value in batch.items() if name != "labels"}
        output = task.output(model(**given), batch).sum()
        gradients = torch.autograd.grad(output, list(model.parameters()), allow_unused=True, materialize_grads=True)
        found.append(torch.cat([one.flatten() for one in gradients]))
    return torch.stack(found)


@pytest.mark.few(2)
@pytest.mark.parametrize("kind", KINDS)
def test_unequal_images_give_what_each_row_gives_alone(kind: str, tmp_path: Path) -> None:
    model = vlm(kind)
    expected = plain(kind, model)
    own = attributor(kind, model, tmp_path, len(expected))
    found = features(own)
    error = (found - expected).norm(dim=1) / expected.norm(dim=1)
    assert float(error.max()) < 1e-5
    tower = [name for name, _ in model.named_parameters() if "vision" in name or "visual" in name]
    offsets = {slot.name: range(slot.offset, slot.offset + slot.numel) for slot in own.features.layout.slots}
    of_images = torch.tensor([place for name in tower for place in offsets[name]])
    has_images = torch.tensor([bool(row["images"]) for row in image_rows(kind)])
    assert bool((found[:, of_images].norm(dim=1) > 0).equal(has_images)), "the tower's parameters have gradients, too"


@pytest.mark.slow
def test_exact_scores_do_not_depend_on_the_batch_size(tmp_path: Path) -> None:
    model = vlm("qwen2_vl")
    scores = []
    for size in (1, 6):
        options = {"curvature": "ekfac", "proj_type": "sjlt", "proj_dim": 64}
        own = attributor("qwen2_vl", model, tmp_path / str(size), size, **options)
        scored = own.attribute(Rows(image_rows("qwen2_vl", (1, 0), seed=1)), top_k=None, method="exact")
        scores.append(np.array(scored["trak_scores"][:]))
    assert np.allclose(scores[0], scores[1], rtol=1e-3, atol=1e-4 * np.abs(scores[0]).max())


def test_images_are_told_apart_by_tokens_and_by_columns() -> None:
    """Without a column of images, the tokens of each text say how many it has."""
    model = vlm("qwen2_vl")
    rows, tokens = image_rows("qwen2_vl"), ImageTokens.of(model)
    assert tokens == ImageTokens(IMAGE, IMAGE + 1, 2)
    batch = vlm_collator("qwen2_vl")(rows)
    by_columns = split_at_images(batch, rows, tokens)
    by_tokens = split_at_images(batch, [{"text": row["text"]} for row in rows], tokens)
    assert [places for places, _ in by_columns] == [places for places, _ in by_tokens] == GROUPS
    for (_, one), (_, other) in zip(by_columns, by_tokens, strict=True):
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in one if name != STACKED)
    alike = by_columns[1][1]
    assert alike["pixel_values"].shape[:2] == (2, 24 + 4)
    assert alike["image_grid_thw"].shape == (2, 2, 3)
    assert alike[STACKED] == ("pixel_values", "image_grid_thw")
    assert "pixel_values" not in by_columns[3][1], "a row without images"
    for place, part in by_columns:
        for position, row in enumerate(place):
            alone = split_at_images(vlm_collator("qwen2_vl")([rows[row]]), [rows[row]], tokens)
            if "pixel_values" in part:
                assert torch.equal(part["pixel_values"][position], alone["pixel_values"][0])


def test_as_many_images_as_rows_need_not_be_one_each() -> None:
    rows = image_rows("llava", (2, 0))
    for given in (rows, [{"text": row["text"]} for row in rows]):
        split = split_at_images(vlm_collator("llava")(rows), given, ImageTokens(IMAGE))
        assert [part["pixel_values"].shape[1] if "pixel_values" in part else 0 for _, part in split] == [2, 0]
    pairs = {"pixel_values": torch.rand(2, 3, 8, 8), "input_ids": torch.ones(2, 4, dtype=torch.long)}
    assert split_at_images(pairs, [{"input_ids": [1] * 4}] * 2, ImageTokens()) is pairs, "a model like CLIP"


def test_what_has_rows_already_is_left_alone() -> None:
    rows = image_rows("paligemma")
    batch = vlm_collator("paligemma")(rows)
    assert split_at_images(batch, rows, ImageTokens(IMAGE)) is batch
    text = {"input_ids": torch.zeros(2, 3, dtype=torch.long)}
    assert split_at_images(text, [{}, {}], ImageTokens(IMAGE)) is text
    assert split_at_images([1, 2], rows, ImageTokens(IMAGE)) == [1, 2]
    equal = image_rows("smolvlm", (2, 2))
    same = vlm_collator("smolvlm")(equal)
    assert split_at_images(same, equal, ImageTokens(IMAGE)) is same
    split = split_at_images(vlm_collator("smolvlm")(image_rows("smolvlm")), image_rows("smolvlm"), ImageTokens(IMAGE))
    assert isinstance(split, SplitRows)
    assert [part.get("pixel_values", torch.empty(0, 0)).shape[1] for _, part in split] == [1, 2, 0]
    assert all(STACKED not in part for _, part in split), "the model takes them by rows"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"image_grid_thw": torch.tensor([[1, 4, 4]] * 7)},
            "made `pixel_values` of 7 images from 6 rows",
        ),
        ({"image_sizes": torch.ones(7, 2)}, "Keep a column `images` in the rows"),
    ],
)
def test_images_that_cannot_be_told_apart(change: dict[str, Tensor], message: str) -> None:
    rows = [{"text": row["text"]} for row in image_rows("llava", (1, 2, 1, 0, 2, 1))]
    batch = vlm_collator("llava")(image_rows("llava", (1, 2, 1, 0, 2, 1)))
    patches = {"pixel_values": torch.zeros(7 * 16, 5)} if "image_grid_thw" in change else {}
    with pytest.raises(ValueError, match=message):
        split_at_images({**batch, **patches, **change}, rows, ImageTokens(IMAGE, merge=4))


@pytest.mark.few(1)
@pytest.mark.parametrize("columns", [True, False])
def test_images_that_are_drawn_at_random(columns: bool, tmp_path: Path) -> None:
    """Rows of equal images share batches of draws; where sizes are not known beforehand, they go one by one."""
    collate = vlm_collator("qwen2_vl")

    def noisy(rows: list[dict[str, Any]]) -> dict[str, Any]:
        batch = collate([{"images": row.get("images", row.get("pictures")), "text": row["text"]} for row in rows])
        if "pixel_values" in batch:
            batch["pixel_values"] = batch["pixel_values"] + torch.rand(()) / 10
        return batch

    rows = image_rows("qwen2_vl")
    if not columns:
        rows = [{"pictures": row["images"], "text": row["text"]} for row in rows]
    found = []
    for size in (1, 2):
        options = {"num_draws": 2, "proj_dim": 64, "feature_dtype": "float32", **QUICK}
        args = trak_config(
            str(tmp_path / str(size)), per_device_batch_size=size, remove_unused_columns=False, **options
        )
        own = TrakAttributor(vlm("qwen2_vl"), args, train_dataset=Rows(rows), data_collator=noisy, task="causal_lm")
        if size > 1 and not columns:
            with pytest.raises(ValueError, match=r"draws at random.*per_device_batch_size=1"):
                own.featurize()
            return
        found.append(features(own))
    assert float(((found[1] - found[0]).norm(dim=1) / found[0].norm(dim=1)).max()) < 1e-5


@pytest.mark.slow
def test_sft_of_a_vision_language_model(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """TRL's trainer, its collator and its processor, then the lines of the README; batches of four as rows alone."""
    trl = pytest.importorskip("trl")
    rows, model = conversations(8), vlm("qwen2_vl")
    model.config.pad_token_id = 0
    options = {"max_length": None, "bf16": False, "gradient_checkpointing": False, "report_to": [], "use_cpu": True}
    options |= {"max_steps": 2, "per_device_train_batch_size": 2, "save_strategy": "no"}
    args = trl.SFTConfig(str(tmp_path / "out"), **options)
    trainer = trl.SFTTrainer(model, args=args, train_dataset=rows, processing_class=processor_of_words())
    trainer.train()
    found = []
    for size in (4, 1):
        config = trak_config(str(tmp_path / str(size)), per_device_batch_size=size, feature_dtype="float32", **QUICK)
        own = TrakAttributor.from_trainer(trainer, config)
        assert "could not be compared" not in caplog.text, "the trainer's loss of rows with images is known"
        own.featurize()
        found.append(torch.cat([shard.grads for shard in own.features.store.train(0)]))
        scored = own.attribute(rows.select(range(3)), top_k=3)
        assert [indices[0] for indices in scored["trak_indices"]] == [0, 1, 2], "a training row is its own proponent"
    assert float(((found[0] - found[1]).norm(dim=1) / found[1].norm(dim=1)).max()) < 1e-5


@pytest.mark.slow
def test_a_loss_of_ones_own_for_rows_with_images(tmp_path: Path) -> None:
    """Features are gradients of what the trainer computes for rows that its collator made alone."""
    trl = pytest.importorskip("trl")

    class Calibrated(trl.SFTTrainer):  # type: ignore[misc, name-defined]
        def compute_loss(self, model: nn.Module, inputs: Any, return_outputs: bool = False, **given: Any) -> Any:
            labels = inputs["labels"][:, 1:]
            logits = model(**inputs).logits[:, :-1]
            each = nn.functional.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
            penalty = logits.logsumexp(2).square().mean(1)
            return (each.sum(1) / (labels != -100).sum(1) + 0.1 * penalty).mean()

    model = vlm("qwen2_vl")
    model.config.pad_token_id = 0
    options = {"max_length": None, "bf16": False, "gradient_checkpointing": False, "report_to": [], "use_cpu": True}
    args = trl.SFTConfig(str(tmp_path / "out"), **options)
    trainer = Calibrated(model, args=args, train_dataset=conversations(3), processing_class=processor_of_words())
    config = trak_config(str(tmp_path / "trak"), proj_type="none", feature_dtype="float32", **QUICK)
    own = TrakAttributor.from_trainer(trainer, config)
    found, names = features(own), [slot.name for slot in own.features.layout.slots]
    parameters = dict(model.eval().named_parameters())
    for row in range(3):
        loss = trainer.compute_loss(model, trainer.data_collator([trainer.train_dataset[row]]))
        alone = torch.autograd.grad(loss, [parameters[name] for name in names])
        expected = -torch.cat([one.flatten() for one in alone])
        assert float((found[row] - expected).norm()) < 1e-5 * float(expected.norm())


@pytest.mark.slow
def test_rows_of_equal_images_share_batches(tmp_path: Path) -> None:
    """Sizes are read from the headers of encoded images, from images, and from arrays; rows keep their places."""
    rows = conversations(8)
    expected = {row: tuple(image.size[::-1] for image in rows[row]["images"]) for row in range(8)}
    assert image_sizes(rows, range(8)) == expected
    assert image_sizes(list(rows), range(8)) == expected
    arrays = Rows(image_rows("qwen2_vl", (1, 1, 0)))
    assert image_sizes(arrays, [0, 2]) == {0: ((3, 16, 16),), 2: ()}
    assert image_sizes(rows.with_transform(lambda row: row), range(8)) is None
    assert image_sizes(rows.remove_columns("images"), range(8)) is None

    model = vlm("qwen2_vl")
    one = attributor("qwen2_vl", model, tmp_path / "one", 1)
    many = attributor("qwen2_vl", model, tmp_path / "many", 2)
    batches = many.features.featurizer().batches(many.train_dataset)
    taken = [list(numbers) for numbers, _ in batches.iterate(batches.cuts(range(6), 2))]
    assert sorted(map(len, taken), reverse=True)[:2] == [2, 2], GROUPS
    error = (features(many) - features(one)).norm(dim=1) / features(one).norm(dim=1)
    assert float(error.max()) < 1e-5


def test_similar_rows_keep_their_numbers(tmp_path: Path) -> None:
    """Embeddings of rows whose batch is divided by sizes of images belong to the same rows as one by one."""
    model, found = vlm("qwen2_vl"), []
    target = Rows(image_rows("qwen2_vl", (1,), seed=3))
    for size in (1, 6):
        own = attributor("qwen2_vl", model, tmp_path / str(size), size)
        featurizer = own.features.featurizer()
        steps = TrialSteps(featurizer, own.task, own.train_dataset, target, ())
        found.append(most_similar(steps, "embeddings", range(6), 6))
    assert found[0] == found[1]
    assert found[0] != sorted(found[0]), "an order that no accident makes"
