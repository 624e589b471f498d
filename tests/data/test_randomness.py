"""Rows that collators and transforms draw at random: seeds for each row and draw, and means over draws."""

import random
from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import store_jobs
import torch
from datasets import Dataset
from test_trl import tokenizer
from torch import Tensor, nn
from trak_options import trak_config
from transformers import (
    BertConfig,
    BertForMaskedLM,
    DataCollatorForLanguageModeling,
    DataCollatorWithPadding,
    set_seed,
)

from hf_trak import StreamedRows, TrakAttributor, TrakConfig
from hf_trak.data.drawn_rows import DrawnRows, RowDraws, generators_kept, held_generators, joined, set_generators
from hf_trak.data.rows import RowBatches
from hf_trak.errors import ConfigMismatchError, HfTrakError
from hf_trak.featurize.row_features import DrawMean
from hf_trak.hub.loading import _draws
from hf_trak.identity.collation import drawn_at_random
from hf_trak.modelout_functions.token_tasks import TokenColumnsCollator

CPU = torch.device("cpu")


def words() -> Any:
    made = tokenizer()
    made.add_special_tokens({"mask_token": "<mask>"})
    return made


def bert(size: int) -> BertForMaskedLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    return BertForMaskedLM(BertConfig(vocab_size=size, max_position_embeddings=32, **sizes)).eval()


def sentences(count: int = 12, seed: int = 0) -> Dataset:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(5, 12, (count,), generator=generator).tolist()
    return Dataset.from_dict(
        {"input_ids": [torch.randint(3, 18, (length,), generator=generator).tolist() for length in lengths]}
    )


def masked(
    directory: Path, rows: Dataset, collator: Any = None, task: str = "masked_lm", workers: int = 0, **options: Any
) -> TrakAttributor:
    made = words()
    collator = DataCollatorForLanguageModeling(made, mlm_probability=0.4) if collator is None else collator
    settings = {"proj_dim": 32, "use_cpu": True, "shard_size": 5, "feature_dtype": "float32", **options}
    config = trak_config(output_dir=str(directory), **settings)
    attributor = TrakAttributor(bert(len(made)), config, rows, collator, task=task)
    attributor.features.num_workers = workers
    return attributor


def features(attributor: TrakAttributor) -> Tensor:
    return torch.cat([shard.grads for shard in attributor.features.store.train(0)])


# -- the same bits ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("num_draws", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_masks_are_the_same_in_every_run_batch_and_worker(num_draws: int, tmp_path: Path) -> None:
    rows = sentences()
    set_seed(1)
    expected = features(masked(tmp_path / "a", rows, num_draws=num_draws).featurize())
    set_seed(2)
    again = features(masked(tmp_path / "b", rows, num_draws=num_draws).featurize())
    assert torch.equal(again, expected)
    workers = masked(tmp_path / "c", rows, num_draws=num_draws, workers=2)
    assert torch.equal(features(workers.featurize()), expected)
    for size in (1, 5):  # the same numbers but for rounding, which differs between batches
        other = masked(tmp_path / f"{size}", rows, num_draws=num_draws, per_device_batch_size=size).featurize()
        torch.testing.assert_close(features(other), expected, rtol=1e-4, atol=1e-5)
    seeded = masked(
        tmp_path / "seed", rows, num_draws=num_draws, seed=1, proj_type="none", grad_wrt=["cls.predictions.bias"]
    )
    first = masked(tmp_path / "seed 0", rows, num_draws=num_draws, proj_type="none", grad_wrt=["cls.predictions.bias"])
    assert not torch.allclose(features(seeded.featurize()), features(first.featurize()))


@pytest.mark.slow
def test_a_run_that_was_interrupted_has_the_same_bits(tmp_path: Path) -> None:
    rows = sentences()
    whole = masked(tmp_path / "whole", rows, num_draws=2).featurize()
    masked(tmp_path / "parts", rows, num_draws=2).featurize(part=(1, 2))
    torch.rand(7)
    parts = masked(tmp_path / "parts", rows, num_draws=2).featurize()
    assert torch.equal(features(parts), features(whole))
    q = [torch.cat([shard.out_to_loss for shard in one.features.store.train(0)]) for one in (whole, parts)]
    assert torch.equal(*q)


def job(directory: Path) -> dict[str, Any]:
    """A whole run, as digests of its files and scores."""
    attributor = masked(directory, sentences(), num_draws=2, per_device_batch_size=2).featurize()
    scores = attributor.attribute(sentences(3, 1), top_k=None).with_format("numpy")["trak_scores"][:]
    return {"files": store_jobs.feature_digests(directory), "scores": store_jobs.digest(scores)}


@pytest.mark.slow
def test_any_number_of_processes_gives_the_same_bits(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    alone = store_jobs.Job(tmp_path / "one" / "report.json", job, tmp_path / "one" / "store").wait(120)
    jobs = store_jobs.start_group(tmp_path / "two", 2, job, tmp_path / "two" / "store", timeout=120)
    assert alone is not None and "value" in alone, alone
    assert [one.wait(120) for one in jobs] == [alone, alone]


@pytest.mark.slow
def test_crops_of_a_transform(tmp_path: Path) -> None:
    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(16, 3)

        def forward(self, pixels: Tensor) -> Tensor:
            return self.head(pixels.flatten(1))

    def crop(rows: dict[str, Any]) -> dict[str, Any]:
        made = []
        for image in rows["image"]:
            top, left = random.randrange(3), int(np.random.randint(3))
            cropped = torch.tensor(image)[top : top + 4, left : left + 4]
            made.append(cropped.flip(1) if torch.rand(()) < 0.5 else cropped)
        return {"pixels": made, "labels": rows["label"]}

    generator = torch.Generator().manual_seed(0)
    rows = Dataset.from_dict({"image": torch.randn(9, 6, 6, generator=generator).tolist(), "label": [0, 1, 2] * 3})
    rows.set_transform(crop)
    found = []
    for name, options in {"a": {}, "b": {"per_device_batch_size": 2}, "c": {}}.items():
        torch.manual_seed(0)
        settings = {"proj_type": "none", "use_cpu": True, "num_draws": 2, **options}
        config = trak_config(output_dir=str(tmp_path / name), **settings)
        model = Network()
        state = random.getstate(), torch.get_rng_state(), np.random.get_state()[1].tolist()
        made = TrakAttributor(model, config, rows, task="image_classification")
        made.features.num_workers = 2 if name == "c" else 0
        found.append(features(made.featurize()))
        assert random.getstate() == state[0] and np.random.get_state()[1].tolist() == state[2]
    assert torch.equal(found[0], found[2])
    torch.testing.assert_close(found[0], found[1], rtol=1e-5, atol=1e-6)
    # The gradient of a linear head is an outer product with its inputs: the mean over two crops.
    batches = made.features.featurizer().batches(rows)
    assert batches.drawn and batches.draws == 2
    crops = [batches.collated([4], draw)["pixels"] for draw in (0, 1)]
    assert not torch.equal(*crops) and torch.equal(batches.collated([2, 4], 1)["pixels"][1], crops[1][0])
    reference = TrakAttributor(
        model, replaced(config, tmp_path / "d"), [(c[0], 1) for c in crops], task="image_classification"
    )
    fixed = reference.featurize().features.store.train(0).read(0)
    expected = (fixed.grads * fixed.out_to_loss[:, None]).sum(0) / fixed.out_to_loss.sum()
    torch.testing.assert_close(found[0][4], expected, rtol=1e-5, atol=1e-6)


def replaced(config: TrakConfig, directory: Path) -> TrakConfig:
    return trak_config(**{**config.to_dict(), "output_dir": str(directory)})


def test_targets_have_draws_of_their_own(tmp_path: Path) -> None:
    attributor = masked(tmp_path / "trak", sentences())
    train, target = (
        attributor.features.featurizer().batches(attributor.train_dataset, side) for side in ("train", "target")
    )
    labels = [batches.collated([3])["labels"] for batches in (train, target)]
    assert labels[0].shape == labels[1].shape and not torch.equal(*labels)


@pytest.mark.slow
def test_streams_are_read_once_per_run(tmp_path: Path) -> None:
    given = list(sentences())
    starts = []

    def read() -> Any:
        starts.append(1)
        yield from given

    class Stream:
        def __iter__(self) -> Any:
            return read()

    streamed = masked(tmp_path / "stream", StreamedRows(Stream(), 12), num_draws=3).featurize()  # type: ignore[arg-type]
    assert torch.equal(features(streamed), features(masked(tmp_path / "rows", given, num_draws=3).featurize()))
    batches = streamed.features.featurizer().batches(streamed.train_dataset)
    assert batches.draws == 3
    starts.clear()
    assert len(list(batches.iterate([range(4), range(4, 8), range(8, 12)], 3))) == 9
    assert len(starts) == 1


@pytest.mark.slow
def test_exact_scores_of_random_rows(tmp_path: Path) -> None:
    """Under the identity they are products of the mean gradients of losses and of outputs, as stores have them."""
    rows = sentences(8)
    options: dict[str, Any] = {"proj_type": "none", "grad_wrt": ["cls.predictions.bias"], "num_draws": 2}
    attributor = masked(tmp_path / "trak", rows, curvature="identity", curvature_damping=1.0, **options).featurize()
    targets = sentences(3, 1)
    scored = attributor.attribute(targets, top_k=None, method="exact")
    attributor.attribute(targets, top_k=None, name="targets")
    losses = masked(tmp_path / "losses", rows, task="loss", **options).featurize()
    target_features = torch.cat([shard.grads for shard in attributor.features.store.saved_targets("targets", 0)])
    expected = target_features @ features(losses).T
    found = torch.tensor(scored["trak_scores"][:])
    torch.testing.assert_close(found / found.norm(), expected / expected.norm(), rtol=1e-4, atol=1e-6)


# -- generators ------------------------------------------------------------------------------------------------------


def test_seeds_belong_to_row_draw_side_and_run() -> None:
    def drawn(*where: Any) -> tuple[float, ...]:
        set_generators(*where)
        return float(torch.rand(())), float(np.random.rand()), random.random()

    expected = drawn(0, "train", 3, 0)
    with generators_kept():
        others = [drawn(1, "train", 3, 0), drawn(0, "target", 3, 0), drawn(0, "train", 4, 0), drawn(0, "train", 3, 1)]
        assert drawn(0, "train", 3, 0) == expected
    for place in range(3):
        assert len({one[place] for one in [expected, *others]}) == 5


def test_generators_of_the_user_are_found_and_put_back() -> None:
    numbers, old, own, torches = (
        np.random.default_rng(0),
        np.random.RandomState(0),
        random.Random(0),
        torch.Generator(),
    )

    class Jitter:
        def __init__(self) -> None:
            self.inner = [{"numbers": numbers}]

        def __call__(self, value: float) -> float:
            return value + old.rand()

    def transform(rows: Any, offset: Any = own) -> Any:
        return rows, torches

    found = held_generators(Jitter(), transform)
    assert {id(one) for one in found} == {id(one) for one in (numbers, old, own, torches)}

    def values() -> tuple[float, ...]:
        return numbers.random(), old.rand(), own.random(), float(torch.rand((), generator=torches))

    before = [numbers.bit_generator.state, own.getstate(), torches.get_state()]
    with generators_kept(found):
        drawn = []
        for row in (0, 1, 0):
            set_generators(0, "train", row, 0, found)
            drawn.append(values())
    assert drawn[0] == drawn[2] and not set(drawn[0]) & set(drawn[1])
    assert before[0] == numbers.bit_generator.state and before[1] == own.getstate()
    assert torch.equal(before[2], torches.get_state())


@pytest.mark.slow
def test_a_collator_with_a_seed_of_its_own(tmp_path: Path) -> None:
    """It makes its generator when it is first called, and in workers with another seed."""
    rows, made = sentences(), words()
    found = []
    for name, workers in (("a", 0), ("b", 0), ("c", 2)):
        collator = DataCollatorForLanguageModeling(made, mlm_probability=0.4, seed=7)
        if name == "b":
            collator([rows[0], rows[1]])
        one = masked(tmp_path / name, rows, collator, num_draws=2, workers=workers)
        found.append(features(one.featurize()))
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])
    fresh, used = (DataCollatorForLanguageModeling(made, mlm_probability=0.4, seed=7) for _ in range(2))
    used([rows[0]])
    first, second = (DrawnRows(rows, one, (one,), 0, "train").__getitems__([(2, 0)]) for one in (fresh, used))
    assert torch.equal(first["labels"], second["labels"])


def test_random_rows_that_no_seed_reaches_are_refused(tmp_path: Path) -> None:
    hidden = random.SystemRandom()
    inner = DataCollatorForLanguageModeling(words(), mlm_probability=0.4)

    def collator(rows: list[Any]) -> Any:
        batch = inner(rows)
        return {**batch, "token_type_ids": torch.full_like(batch["input_ids"], hidden.randrange(2))}

    with pytest.raises(ValueError, match=r"token_type_ids.*although the generators .*same seeds.*dataset\.map"):
        masked(tmp_path / "trak", sentences(), collator).featurize()
    assert not list((tmp_path / "trak").rglob("*.safetensors"))


def mixup(given: list[Any]) -> dict[str, Any]:
    """A part of every picture and label comes from the row before, as by Mixup of torchvision."""
    share = float(np.random.default_rng(int(torch.randint(2**30, ()))).beta(1, 1))
    pixels = torch.tensor([row["pixels"] for row in given])
    labels = torch.eye(3)[[row["label"] for row in given]]
    return {
        name: share * one + (1 - share) * one.roll(1, 0) for name, one in {"pixels": pixels, "labels": labels}.items()
    }


def pairs_of_labels(given: list[Any]) -> dict[str, Any]:
    """The label of another row is an entry of its own, in half of the batches."""
    labels = torch.tensor([row["label"] for row in given])
    other = labels.flip(0) if random.random() < 0.5 else labels
    return {"pixels": torch.tensor([row["pixels"] for row in given]), "labels": labels, "others": other}


def noise(given: list[Any]) -> dict[str, Any]:
    pixels = torch.tensor([row["pixels"] for row in given])
    return {"pixels": pixels + torch.randn(pixels.shape), "labels": torch.tensor([row["label"] for row in given])}


def single(given: list[Any]) -> dict[str, Any]:
    (row,) = given
    return {"pixels": torch.tensor([row["pixels"]]) + torch.randn(1, 2)}


@pytest.mark.parametrize(
    "collator, named",
    [(mixup, "`pixels`, `labels` of row 0"), (pairs_of_labels, "`others` of row 0"), (noise, None), (single, None)],
)
def test_collators_that_mix_rows_are_refused(collator: Any, named: str | None) -> None:
    rows = Dataset.from_dict({"pixels": [[1.0, 2.0], [3.0, 5.0], [4.0, 8.0], [0.0, 1.0]], "label": [0, 1, 2, 1]})
    batches = RowBatches(rows, collator, columns=None, device=CPU, draws=RowDraws())
    if named is None:
        assert batches.drawn
        return
    with pytest.raises(ValueError, match=rf"mixes rows, such as by Mixup or CutMix: {named} depend.*`data_collator`"):
        batches.probe()


def test_masks_of_tokens_of_one_length_are_no_mixture() -> None:
    made = words()
    rows = Dataset.from_dict({"input_ids": [[3 + (row + place) % 15 for place in range(9)] for row in range(6)]})
    collator = DataCollatorForLanguageModeling(made, mlm_probability=0.4)
    assert RowBatches(rows, collator, columns=None, device=CPU, draws=RowDraws()).drawn


def test_drawing_without_any_effect_counts_as_random() -> None:
    calls = []

    def rarely(rows: list[int]) -> Tensor:
        calls.append(rows)
        return torch.tensor(rows) + (torch.rand(()) > 1).long()

    assert drawn_at_random(rarely, [0, 1]) and len(calls) == 1
    assert not drawn_at_random(lambda rows: torch.tensor(rows), [0, 1])
    assert drawn_at_random(lambda rows: torch.tensor([random.SystemRandom().random()]), [0])


# -- what is recorded ------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_rows_of_a_table_that_are_only_padded_are_collated_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a table holds and a collator of transformers pads is the same each time; all else is tried out."""
    made, rows, calls = words(), sentences(), list[int]()

    class Own(DataCollatorWithPadding):
        pass

    def probed(collator: Any, table: Any) -> int:
        draws = RowDraws(0, 1)
        batches = RowBatches(table, collator, columns=None, device=CPU, draws=draws)
        calls.clear()
        collate, numbers, drawn = batches.probe()
        assert not drawn and len(numbers) == 6 and set(collate(numbers)) == {f"row {row}" for row in numbers}
        return len(calls)

    pad = type(made).pad
    monkeypatch.setattr(type(made), "pad", lambda *given, **options: [calls.append(1), pad(*given, **options)][1])
    plain = TokenColumnsCollator(DataCollatorWithPadding(made), "input_ids")
    assert probed(plain, rows) == 1 + 6  # whether a single row is taken, and each row by the test
    for collator, table in ((Own(made), rows), (plain, rows.with_transform(lambda batch: batch))):
        assert probed(collator, table) >= 1 + 6 * 5 + 6


def test_the_number_of_draws_belongs_to_random_features(tmp_path: Path) -> None:
    rows = sentences()
    masked(tmp_path / "random", rows, num_draws=2).featurize()
    with pytest.raises(ConfigMismatchError, match=r"draws of each row: saved 2, given 3"):
        masked(tmp_path / "random", rows, num_draws=3).featurize()
    fixed = rows.map(lambda row: {"labels": row["input_ids"]})

    def collator(given: list[Any]) -> Any:
        tokens = [torch.tensor(row["input_ids"][:5]) for row in given]
        return {"input_ids": torch.stack(tokens), "labels": torch.stack(tokens)}

    expected = features(masked(tmp_path / "fixed", fixed, collator).featurize())
    other = masked(tmp_path / "fixed", fixed, collator, num_draws=5).featurize()
    assert other.features.featurizer().batches(fixed).draws == 1 and torch.equal(features(other), expected)
    assert "draws" not in other.features.store.config["collation"]


def test_what_depends_on_row_numbers_or_squares_is_refused(tmp_path: Path) -> None:
    attributor = masked(tmp_path / "trak", sentences(), num_draws=2).featurize()
    for change in (lambda: attributor.exclude([0]), lambda: attributor.extend(sentences(2, 1))):
        with pytest.raises(HfTrakError, match=r"rows come at random.*directory of its own"):
            change()
    with pytest.raises(HfTrakError, match=r"`num_draws` is 2.*Self-influence.*num_draws=1"):
        attributor.self_influence(method="exact")
    with pytest.raises(HfTrakError, match=r"`num_draws` is 2.*num_draws=1"):
        attributor.attribute(sentences(2), per_token=True)


@pytest.mark.slow
def test_a_loaded_index_draws_its_targets_as_often(tmp_path: Path) -> None:
    made = masked(tmp_path / "trak", sentences(), num_draws=3).featurize()
    targets = sentences(3, 1)
    expected = made.attribute(targets, top_k=2)["trak_scores"][:]
    options: dict[str, Any] = {"task": "masked_lm", "data_collator": made.features.data_collator, "use_cpu": True}
    loaded = TrakAttributor.from_pretrained(str(tmp_path / "trak"), made.model, **options)
    assert loaded.args.num_draws == 3
    assert loaded.attribute(targets, top_k=2, name="again")["trak_scores"][:] == expected
    for draws in ("many", 10**12, True, 0):
        content = {
            **made.features.store.config,
            "collation": {**made.features.store.config["collation"], "draws": draws},
        }
        index = SimpleNamespace(store=SimpleNamespace(config=content), name="trak")
        with pytest.raises(ConfigMismatchError, match=r"draws of each random row. Expected a number from 1 to 10,000"):
            _draws(index)  # type: ignore[arg-type]


@pytest.mark.slow
def test_the_rate_is_measured_with_all_draws(tmp_path: Path) -> None:
    one, many = (masked(tmp_path / str(draws), sentences(), num_draws=draws) for draws in (1, 8))
    assert many.features.measured_rate() < 0.6 * one.features.measured_rate()


# -- means over draws ------------------------------------------------------------------------------------------------


def test_means_have_the_gradient_of_the_expected_loss() -> None:
    generator = torch.Generator().manual_seed(0)
    draws = [(torch.randn(4, 6, generator=generator), torch.randn(4, generator=generator)) for _ in range(5)]
    for _, q in draws:
        q[3] = 0
    train, target, one = DrawMean("train"), DrawMean("target"), DrawMean("train")
    for x, q in draws:
        train.add(x, q)
        target.add(x, q)
    x, q = train.result()
    expected = sum(each * weight[:, None] for each, weight in draws) / 5
    torch.testing.assert_close(x * q[:, None], expected)
    assert (q >= 0).all() and q[3] == 0
    plain = sum(each for each, _ in draws) / 5
    torch.testing.assert_close(x[3], plain[3])
    torch.testing.assert_close(target.result()[0], plain)
    one.add(*draws[0])
    assert one.result()[0] is draws[0][0] and one.result()[1] is draws[0][1]


@pytest.mark.slow
def test_the_cosine_between_two_seeds_rises_as_theory_says(tmp_path: Path) -> None:
    """With x the mean of D independent draws of mean μ and total variance σ², cos ≈ μ² / (μ² + σ²/D)."""
    rows = sentences(16, 3)
    options: dict[str, Any] = {"proj_type": "none", "grad_wrt": ["cls.predictions.transform.dense.weight"]}

    def expected_gradients(seed: int, draws: int) -> Tensor:
        made = masked(tmp_path / f"{seed}-{draws}", rows, seed=seed, num_draws=draws, **options).featurize()
        q = torch.cat([shard.out_to_loss for shard in made.features.store.train(0)])
        return features(made) * q[:, None]

    runs = {1: 8, 4: 4, 16: 2}
    found = {draws: [expected_gradients(seed, draws).flatten() for seed in range(runs[draws])] for draws in runs}
    cosines = {
        draws: float(np.mean([nn.functional.cosine_similarity(*pair, dim=0) for pair in combinations(vectors, 2)]))
        for draws, vectors in found.items()
    }
    # |x|² has the mean μ² + σ²/D, and x·x′ of two seeds the mean μ²: both from the pairs with the most draws.
    first, second = found[16]
    signal = float((first * second).sum())
    noise = 16 * (float(first.square().sum() + second.square().sum()) / 2 - signal)
    assert cosines[1] < cosines[4] < cosines[16]
    for draws, cosine in cosines.items():
        predicted = signal / (signal + noise / draws)
        assert cosine == pytest.approx(predicted, abs=0.06), (draws, cosines)


@pytest.mark.slow
def test_copies_of_training_rows_find_themselves(tmp_path: Path) -> None:
    rows = sentences(20, 5)
    attributor = masked(tmp_path / "trak", rows, num_draws=16, proj_dim=512).featurize()
    scored = attributor.attribute(rows.select(range(4)), top_k=3)
    assert [row[0] for row in scored["trak_indices"][:]] == [0, 1, 2, 3]


# -- joining ---------------------------------------------------------------------------------------------------------


def together_of(collate: Callable[[list[Any]], Any], rows: list[Any]) -> Any:
    return joined([collate([row]) for row in rows], lambda: collate(rows))


@pytest.mark.parametrize("side", ["left", "right"])
def test_single_rows_are_joined_as_a_tokenizer_pads(side: str) -> None:
    made = words()
    made.padding_side = side
    rows = [{"input_ids": list(range(3, 3 + length)), "labels": list(range(4, 4 + length))} for length in (3, 7, 5)]

    def collate(given: list[Any]) -> Any:
        batch = made.pad([{"input_ids": row["input_ids"]} for row in given], return_tensors="pt")
        width = batch["input_ids"].shape[1]
        labels = [
            [-100] * (width - len(row["labels"])) * (side == "left") + row["labels"]
            + [-100] * (width - len(row["labels"])) * (side == "right") for row in given
        ]  # fmt: skip
        return {**batch, "labels": torch.tensor(labels), "flag": True, "names": [str(row) for row in given]}

    found, expected = together_of(collate, rows), collate(rows)
    assert list(found) == list(expected)
    for name, value in expected.items():
        assert torch.equal(found[name], value) if isinstance(value, Tensor) else found[name] == value


def test_images_of_different_sizes_and_patches_are_joined() -> None:
    def collate(rows: list[Tensor]) -> Any:
        height, width = (max(row.shape[axis] for row in rows) for axis in (0, 1))
        images, mask = torch.zeros(len(rows), height, width), torch.zeros(len(rows), height, width, dtype=torch.long)
        for place, row in enumerate(rows):
            images[place, : row.shape[0], : row.shape[1]] = row
            mask[place, : row.shape[0], : row.shape[1]] = 1
        patches = torch.cat([row.flatten()[:, None].expand(-1, 2) for row in rows])
        return (images, {"mask": mask, "patches": patches})

    rows = [torch.randn(2, 3) + 5, torch.randn(4, 2) + 5]
    found, expected = together_of(collate, rows), collate(rows)
    assert torch.equal(found[0], expected[0])
    assert all(torch.equal(found[1][name], expected[1][name]) for name in ("mask", "patches"))


def test_rows_that_cannot_be_joined_are_refused() -> None:
    def patterned(rows: list[Tensor]) -> Tensor:
        width = max(map(len, rows))
        return torch.stack([row.repeat(4)[:width] for row in rows])

    with pytest.raises(ValueError, match=r"draws at random.*itself.*max_length.*`per_device_batch_size=1`"):
        together_of(patterned, [torch.tensor([1, 2]), torch.tensor([1, 2, 3, 4])])
    with pytest.raises(ValueError, match=r"`total` of a batch is not one of each row"):
        together_of(
            lambda rows: {"x": torch.stack(rows), "total": sum(map(float, rows))}, [torch.ones(()), torch.zeros(())]
        )
    with pytest.raises(ValueError, match=r"\[\('a',\)\] and \[\('b',\)\]"):
        joined([{"a": torch.ones(1)}, {"b": torch.ones(1)}], dict)


def test_rows_alone_and_in_workers_need_no_device(tmp_path: Path) -> None:
    rows = [float(i) for i in range(6)]

    def collate(given: list[float]) -> Tensor:
        return torch.tensor(given) + torch.rand(len(given))

    batches = RowBatches(rows, collate, columns=None, device=CPU, draws=RowDraws(3, 2), side="target")
    (numbers, first), (again, second) = list(batches.iterate([[1, 4]], batches.draws))
    ((_, once),) = batches.iterate([[1, 4]])  # for what takes one draw, such as a curvature
    assert torch.equal(once, first)
    noise = torch.stack([first, second]) - torch.tensor([1.0, 4.0])
    assert len(set(noise.flatten().tolist())) == 4  # of each row and draw
    assert numbers == again == [1, 4] and not torch.equal(first, second)
    assert torch.equal(batches.collated([4], 1), second[1:]) and torch.equal(batches.alone(4), first[1:])
    drawn = DrawnRows(rows, collate, (), 3, "target")
    assert torch.equal(drawn.__getitems__([(1, 0), (4, 0)]), first)
    plain = RowBatches(rows, torch.tensor, columns=None, device=CPU, draws=RowDraws(3, 2))
    assert not plain.drawn and [rows for rows, _ in plain.iterate([[1], [2]], plain.draws)] == [[1], [2]]
