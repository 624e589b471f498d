"""The review of a training dataset: planted wrong labels and duplicates are found, fixed, and proved by retraining."""

import logging
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from datasets import ClassLabel, Dataset, Features, List, Value, concatenate_datasets
from regressions import Line
from sklearn.datasets import load_digits
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel, Trainer, TrainingArguments
from transformers.modeling_outputs import SequenceClassifierOutput

from hf_trak import TrakAttributor, TrakConfig
from hf_trak.data.drawn_rows import RowDraws
from hf_trak.data.rows import RowBatches
from hf_trak.evaluation import TrainerRetraining, changed_rows, fixed_dataset, prove_removal, with_wrong_labels
from hf_trak.evaluation.intervals import Interval
from hf_trak.evaluation.review import (
    RemovalProof,
    class_column,
    repeated_rows,
    review_table,
    trained_classes,
    wrong_labels,
)
from hf_trak.modelout_functions import (
    CausalLMModelOutput,
    LossModelOutput,
    RegressionModelOutput,
    RowLossModelOutput,
    TextClassificationModelOutput,
)
from hf_trak.report import training_report

N, WRONG, TWICE = 600, 30, (3, 40, 77)
"""Training rows, wrong labels among them, and rows that stand again at the end."""


class Network(PreTrainedModel):
    """A small network for the pixels of digits."""

    config_class = PretrainedConfig

    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__(config)
        self.first, self.second = nn.Linear(64, 32), nn.Linear(32, 10)
        self.post_init()

    def forward(self, pixels: Tensor, labels: Tensor | None = None) -> SequenceClassifierOutput:
        logits = self.second(torch.relu(self.first(pixels)))
        loss = None if labels is None else nn.functional.cross_entropy(logits, labels)
        return SequenceClassifierOutput(loss=loss, logits=logits)


def digits() -> tuple[Dataset, Dataset, np.ndarray]:
    """Make training rows, validation rows, and the labels that the training rows should have."""
    pixels, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(pixels))
    features = Features({"pixels": List(Value("float32"), length=64), "labels": ClassLabel(num_classes=10)})

    def rows(of: np.ndarray) -> Dataset:
        table = {"pixels": (pixels[of] / 16).astype(np.float32).tolist(), "labels": labels[of].tolist()}
        return Dataset.from_dict(table, features=features)

    own = order[:N]
    return rows(own), rows(order[N : N + 200]), labels[own]


def trainer_of(rows: Dataset, where: Path) -> Trainer:
    torch.manual_seed(0)
    arguments = TrainingArguments(
        str(where), num_train_epochs=15, learning_rate=4e-3, per_device_train_batch_size=32, seed=0, use_cpu=True,
        report_to=[], save_strategy="no", logging_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    config = PretrainedConfig(num_labels=10, problem_type="single_label_classification")
    return Trainer(Network(config), arguments, train_dataset=rows)


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Review a run whose training rows have wrong labels, and three rows twice at the end."""
    place = tmp_path_factory.mktemp("review")
    train, validation, right = digits()
    noisy, wrong = with_wrong_labels(train, WRONG / N, seed=1)
    noisy = noisy.select([*range(N), *TWICE])
    trainer = trainer_of(noisy, place)
    trainer.train()
    attributor = TrakAttributor.from_trainer(trainer, TrakConfig(str(place / "trak")), "image_classification")
    table = attributor.review(validation)
    return {"table": table, "wrong": wrong, "right": right, "rows": noisy, "validation": validation, "place": place}


@pytest.mark.slow
def test_wrong_labels_are_found(planted: dict[str, Any]) -> None:
    table, wrong = planted["table"], planted["wrong"]
    found = [row for row, action in enumerate(table["suggested_action"]) if action == "relabel"]
    hits = [row for row in found if row < N and wrong[row]]
    assert len(hits) >= 0.8 * WRONG and len(hits) >= 0.8 * len(found)
    named = [table[row]["suggested_label"] == planted["right"][row] for row in hits]
    assert np.mean(named) >= 0.9
    assert all(table[row]["effect"] > 0 for row in found)


def test_repeated_rows_are_found(planted: dict[str, Any]) -> None:
    table = planted["table"]
    for place, row in enumerate(TWICE):
        assert table[N + place]["reason"] in (f"the same as row {row}", "rows like it have another label")
        assert not planted["wrong"][row] or table[N + place]["suggested_action"] != "keep"


def test_the_fixed_dataset_has_better_labels(planted: dict[str, Any]) -> None:
    fixed = fixed_dataset(planted["table"])
    assert fixed.column_names == planted["rows"].column_names and fixed.features == planted["rows"].features
    removed = planted["table"]["suggested_action"].count("remove")
    assert len(fixed) == N + len(TWICE) - removed
    kept = [row for row, action in enumerate(planted["table"]["suggested_action"]) if action != "remove"]
    right = np.append(planted["right"], planted["right"][list(TWICE)])[kept]
    before = np.array(planted["rows"]["labels"])[kept]
    assert (np.array(fixed["labels"]) != right).sum() <= 0.4 * (before != right).sum()


@pytest.mark.slow
def test_a_training_proves_it(planted: dict[str, Any]) -> None:
    """Without the rows that the review changes, validation outputs are higher than without as many random ones."""
    pytest.importorskip("scipy")
    rows = planted["rows"]

    def make(train: Any, seed: int) -> Trainer:
        return trainer_of(train, planted["place"] / "again")

    retraining = TrainerRetraining(make, rows, planted["validation"], "image_classification", drop="mask", seed=0)
    proof = prove_removal(changed_rows(planted["table"]), retraining)
    assert proof.gain.low > 0 and proof.better > 0.7
    assert "random" in str(proof)
    none = prove_removal(np.random.default_rng(5).choice(N, proof.removed, replace=False), retraining)
    assert abs(none.gain.value) < 0.5 * proof.gain.value


def test_labels_that_other_rows_do_not_confirm() -> None:
    """The own score is no confirmation; the label that speaks most against the row is named."""
    sums = np.array([[5.0, -1, -3], [5.0, -1, -3], [-4.0, -1, 6]])
    assert wrong_labels(sums, own=[0, 3, 1], labels=[0, 0, 2]) == {1: 2}


@pytest.mark.slow
def test_doubts_that_meet_validation_rows_relabel_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Of labels that are drawn at random none can be doubted with reason."""
    train, validation, _ = digits()
    drawn = np.random.default_rng(2).integers(10, size=100).tolist()
    noisy = train.select(range(100)).remove_columns("labels").add_column("labels", drawn)
    noisy = noisy.cast_column("labels", train.features["labels"])
    trainer = trainer_of(noisy, tmp_path)
    trainer.args.num_train_epochs, trainer.args.learning_rate = 60, 1e-2  # it learns them by heart
    trainer.train()
    attributor = TrakAttributor.from_trainer(trainer, TrakConfig(str(tmp_path / "trak")), "image_classification")
    with caplog.at_level("WARNING"):
        table = attributor.review(validation.select(range(50)))
    assert [text for text in caplog.messages if "of the doubted labels may well be right" in text]
    assert set(table["suggested_action"]) <= {"keep", "look"} and fixed_dataset(table)["labels"] == drawn
    assert sum(label is not None for label in table["suggested_label"]) > 5
    found = training_report(attributor.features, validation.select(range(50)), tmp_path / "page.html")
    assert found.rough_doubts and found.rough_doubts in str(found)
    assert found.rough_doubts in (tmp_path / "page.html").read_text()


def test_what_harms_a_regression_is_told_from_what_lowers_its_predictions(tmp_path: Path) -> None:
    """By plain autograd: the product of the gradients of two losses. Predictions are too high, and too low."""
    draws = np.random.default_rng(0)

    def rows(count: int) -> Dataset:
        return Dataset.from_dict(
            {"x": draws.normal(size=(count, 3)).tolist(), "labels": draws.normal(size=count).tolist()}
        )

    train, validation, model = rows(30), rows(8), Line()
    args = TrakConfig(str(tmp_path), curvature="identity", use_cpu=True)
    table = TrakAttributor(model, args, train, task="regression").review(validation)

    def gradient(given: Dataset) -> torch.Tensor:
        errors = model(torch.tensor(given["x"][:]))["logits"][:, 0] - torch.tensor(given["labels"][:])
        return torch.cat(
            [one.flatten() for one in torch.autograd.grad(errors.square().mean(), list(model.parameters()))]
        )

    expected = [-float(gradient(train.select([row])) @ gradient(validation)) for row in range(30)]
    assert np.corrcoef(table["effect"][:], expected)[0, 1] > 0.999
    task = LossModelOutput(of=RegressionModelOutput())
    of_loss = TrakAttributor(model, TrakConfig(str(tmp_path / "loss"), use_cpu=True), train, task=task)
    with pytest.raises(TypeError, match="whose targets are the predictions of a regression"):
        of_loss.review(validation)


def as_text(batch: list[dict[str, Any]]) -> dict[str, Any]:
    """Collate rows of any columns."""
    return {name: [row[name] for row in batch] for name in batch[0]}


def on_their_way(rows: Dataset, columns: list[str] | None = None) -> RowBatches:
    draws = RowDraws()
    return RowBatches(rows, as_text, columns=columns, device=torch.device("cpu"), draws=draws)


READ = "abcadbaa"
"""Letters, the content of rows: 3, 6 and 7 repeat 0, and 5 repeats 1."""


def numbered(read: str = "letter") -> Dataset:
    """Make rows with a number, a name of a file and a source of their own, beside a letter in the column `read`."""
    numbers = range(len(READ))
    return Dataset.from_dict(
        {
            "number": numbers, "file_name": [f"{i}.png" for i in numbers], "id": [f"r{i}" for i in numbers],
            read: list(READ), "source": ["web" if i % 2 else "book" for i in numbers], "label": [0, 1] * 4,
        }
    )  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("columns of the model", {3: 0, 5: 1, 6: 0, 7: 0}),
        ("transform of the letter", {3: 0, 5: 1, 6: 0, 7: 0}),
        ("transform of the number", {}),  # though sources, labels and letters of it are the same
        ("transform of half the number", {2 * i + 1: 2 * i for i in range(4)}),
        ("transform at random", {3: 0, 5: 1, 6: 0, 7: 0}),
        ("every column", {}),  # which the collator reads, as far as anybody knows
        ("labels alone", {}),
        ("a tensor", {3: 0, 5: 1, 6: 0, 7: 0}),
        ("no single row", {}),
    ],
)
def test_rows_repeat_others_if_the_model_gets_the_same(
    kind: str, expected: dict[int, int], caplog: pytest.LogCaptureFixture
) -> None:
    rows, columns = numbered(), ["made", "label"]
    made = {
        "transform of the letter": lambda batch: [ord(one) for one in batch["letter"]],
        "transform of the number": lambda batch: [READ[::-1] * (i + 1) for i in batch["number"]],
        "transform of half the number": lambda batch: [i // 2 for i in batch["number"]],
        "transform at random": lambda batch: [ord(one) + random.random() for one in batch["letter"]],
    }
    if kind in made:
        rows = rows.with_transform(lambda batch: {"made": made[kind](batch), **batch})
    if kind == "columns of the model":
        rows = numbered("made")
    batches = on_their_way(rows, ["label"] if kind == "labels alone" else None if kind == "every column" else columns)
    if kind == "a tensor":
        batches = on_their_way(numbered("made"), columns)
        batches.collator = lambda rows: torch.tensor([ord(row["made"]) for row in rows])
    if kind == "no single row":
        batches = on_their_way(numbered("made"), columns)
        batches.collator = lambda rows: as_text(rows[:-1])
    assert repeated_rows(batches, "label") == expected
    assert ("not looked for" in caplog.text) == (kind == "no single row")


def test_a_row_is_compared_with_all_rows_that_it_repeats() -> None:
    """Of the labels 0, 1, 1 of one text, the third repeats the second, and only the second differs from the first."""
    labels = [0, 1, 1, 0, 1, 2]
    rows = Dataset.from_dict({"text": ["a"] * 6, "labels": labels})
    table = review_table(rows, [-1.0] * 6, "labels", repeated=repeated_rows(on_their_way(rows), "labels"))
    assert table["suggested_action"] == ["keep", "look", "remove", "remove", "remove", "look"]
    for row, reason in enumerate(table["reason"]):
        same = labels.index(labels[row])  # the first row of that label
        other = "the same as row 0, with another label" if row else ""
        assert reason == (other if same == row else f"the same as row {same}")
    assert fixed_dataset(table)["labels"] == [0, 1, 2]


def rows_of_text() -> Dataset:
    return Dataset.from_dict({"id": range(5), "text": ["a", "b", "a", "a", "c"], "label": [0, 1, 0, 1, 1]})


def test_table_of_effects() -> None:
    """A repeated row with another label is to be looked at."""
    table = review_table(rows_of_text(), [-1.0, 1e-5, -1.0, -1.0, 9.0], "label", {0: 1}, repeated={2: 0, 3: 0})
    assert table["reason"] == [
        "rows like it have another label", "no effect", "the same as row 0", "the same as row 0, with another label",
        "harms the validation set",
    ]  # fmt: skip
    assert table["suggested_action"] == ["relabel", "keep", "remove", "look", "look"]
    assert table["suggested_label"] == [1, None, None, None, None]
    fixed = fixed_dataset(table)
    assert fixed["label"] == [1, 1, 1, 1] and fixed["id"] == [0, 1, 3, 4]
    calm = review_table(Dataset.from_dict({"text": ["a", "b", "c"]}), [-1.0, 0.5, -0.8])
    assert calm["reason"] == [""] * 3 and "suggested_label" not in calm.column_names


def test_rows_that_harm_most_do_not_hide_each_other() -> None:
    """Their own effects make the standard deviation of all effects six times that of the others."""
    effects = [*np.random.default_rng(0).normal(size=180), *np.full(20, 20.0)]
    table = review_table(Dataset.from_dict({"text": ["a"] * 200}), effects)
    looked = [row for row, action in enumerate(table["suggested_action"]) if action == "look"]
    assert looked[-20:] == list(range(180, 200)) and len(looked) <= 28
    assert 2 * np.std(effects) > 11


def test_rows_keep_their_numbers_when_a_table_is_sorted_or_filtered() -> None:
    """Truth: the letters of the rows, which are all different."""
    actions = ["keep", "remove", "look", "relabel", "keep", "remove"]
    rows = Dataset.from_dict({"text": list("abcdef"), "label": [0, 1] * 3})
    table = review_table(rows, [3.0, -1, 2, -5, 4, 1], "label", {3: 0}, repeated={1: 0, 5: 1})
    table = table.remove_columns("suggested_action").add_column("suggested_action", actions)
    ordered, flipped = table.sort("effect"), table.select(range(5, -1, -1))
    for one in (table, ordered, flipped, table.shuffle(seed=1)):
        assert [rows[int(row)]["text"] for row in changed_rows(one)] == ["b", "d", "f"]
        fixed = fixed_dataset(one)
        assert fixed["text"] == ["a", "c", "d", "e"] and fixed["label"] == [0, 0, 0, 0]
    acted = table.filter(lambda row: row["suggested_action"] != "keep")
    assert changed_rows(acted).tolist() == [1, 3, 5] and fixed_dataset(acted)["text"] == ["c", "d"]
    for use in (changed_rows, fixed_dataset):
        with pytest.raises(ValueError, match=r"Expected 'trak_index'.*all of its columns"):
            use(table.remove_columns("trak_index"))


def doubled(batch: dict[str, Any]) -> dict[str, Any]:
    return {"twice": [2 * one for one in batch["effect"]], "reason": batch["reason"]}


def test_fixed_rows_have_the_columns_and_the_transform_of_the_training_rows(tmp_path: Path) -> None:
    """Also columns that are called like those of the table, which a transform may read."""
    given = {
        "trak_index": [7, 8, 9], "effect": ["x", "y", "z"], "reason": ["r"] * 3, "label": [0, 1, 0],
        "suggested_action": ["?"] * 3, "suggested_label": [5, 6, 7], "own_effect": [True] * 3,
    }  # fmt: skip
    plain = Dataset.from_dict(given)
    rows = plain.with_transform(doubled)
    table = review_table(rows, [1.0, -2.0, 3.0], "label", {1: 0}, repeated={2: 0})
    assert table["effect"] == [1.0, -2.0, 3.0] and table[0]["trak_own_effect"] == "x"  # as stored
    for edited in (table, table.sort("effect"), table.filter(lambda row: row["label"] >= 0)):
        fixed = fixed_dataset(edited)
        assert fixed[:] == {"twice": ["xx", "yy"], "reason": ["r", "r"]} and len(fixed) == 2
        expected = {name: values[:2] for name, values in given.items()} | {"label": [0, 0]}
        assert fixed.with_format(None)[:] == expected and fixed.column_names == plain.column_names
    arrays = review_table(plain.with_format("numpy", ["label"]), [1.0] * 3, "label")
    assert isinstance(fixed_dataset(arrays)[:]["label"], np.ndarray) and list(fixed_dataset(arrays)[0]) == ["label"]
    table.to_json(tmp_path / "table.jsonl")
    read = Dataset.from_json(str(tmp_path / "table.jsonl"), cache_dir=str(tmp_path / "cache"))
    assert fixed_dataset(read)[:] == expected
    assert fixed_dataset(review_table(plain, [1.0] * 3)).format == plain.format


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [
        ("suggested_action", "delete", "`suggested_action` has 'delete'"),
        ("suggested_label", None, "Row 0 is to be relabelled"),
    ],
)
def test_an_edited_table_is_checked(column: str, value: Any, message: str) -> None:
    table = review_table(rows_of_text(), [1.0] * 5, "label", {0: 1})
    values = [value, *table[column][1:]]
    edited = table.remove_columns([column]).add_column(column, values, feature=table.features[column])
    with pytest.raises(ValueError, match=message):
        fixed_dataset(edited)
    with pytest.raises(ValueError, match="Row 0 is to be relabelled"):
        fixed_dataset(table.remove_columns("suggested_label"))
    with pytest.raises(ValueError, match="Expected 'suggested_action'"):
        fixed_dataset(table.remove_columns("suggested_action"))


@pytest.mark.parametrize(("gain", "said"), [(-0.154, "0.154 lower"), (0.2, "0.2 higher"), (0.0, "0 higher")])
def test_a_proof_says_which_way_outputs_go(gain: float, said: str) -> None:
    text = str(RemovalProof(6, Interval(gain, gain - 0.1, gain + 0.3), 0.4))
    assert f"outputs are {said} in the mean (a change of {gain - 0.1:+.3g} to {gain + 0.3:+.3g})" in text
    assert "higher for 40% of the targets" in text


def test_random_rows_are_proved_no_better_than_random_rows() -> None:
    """Trainings whose outputs depend on rows, and on chance that all targets share, for 300 choices of rows."""
    effects = np.random.default_rng(0).normal(size=(100, 12)) + np.random.default_rng(1).normal(size=(100, 1))

    class Chaotic:
        train_dataset = range(100)

        def __call__(self, rows: np.ndarray, seed: int) -> np.ndarray:
            chance = np.random.default_rng(rows.tolist()).normal()
            return effects[rows].sum(0) + chance

    held = 0
    for seed in range(300):
        proof = prove_removal(np.random.default_rng(seed).choice(100, 10, replace=False), Chaotic(), seed)
        held += 0.0 in proof.gain
    assert 0.95 - held / 300 < 3 * (0.05 * 0.95 / 300) ** 0.5
    worst = np.argsort(effects.sum(1))[:10]
    assert prove_removal(worst, Chaotic()).gain.low > 0
    with pytest.raises(ValueError, match="`draws` is 1"):
        prove_removal(worst, Chaotic(), draws=1)


def test_rows_to_leave_out_must_leave_others() -> None:
    class Never:
        train_dataset = range(10)

        def __call__(self, rows: np.ndarray, seed: int) -> np.ndarray:
            raise AssertionError

    for rows in ([], range(6), [10], [-1]):
        with pytest.raises(ValueError, match="Expected at least one"):
            prove_removal(list(rows), Never())


def test_what_was_fixed_is_said(caplog: pytest.LogCaptureFixture) -> None:
    """Also that nothing was: rows to look at stay as they are."""
    caplog.set_level(logging.INFO, "hf_trak")
    rows = Dataset.from_dict({"labels": [0, 1, 0]})
    fixed_dataset(review_table(rows, [0.1, -1.0, 0.2], "labels", {1: 0}))
    assert "Rows relabelled: 1, removed: 0, to look at and left as they are: 0." in caplog.text
    fixed_dataset(review_table(rows, [0.1, -1.0, 0.2], "labels", {1: 0}, relabel=False))
    assert "Rows relabelled: 0, removed: 0, to look at and left as they are: 1." in caplog.text


def test_a_row_that_is_in_a_table_twice_is_refused() -> None:
    """As where two edited parts are put together: it would be trained on twice."""
    table = review_table(Dataset.from_dict({"labels": [0, 1, 0]}), [0.1, -1.0, 0.2], "labels", {1: 0})
    for apply in (fixed_dataset, changed_rows):
        with pytest.raises(ValueError, match="has the row 1 2 times"):
            apply(concatenate_datasets([table, table.select([1])]))


@pytest.mark.parametrize(
    ("task", "model", "column"),
    [
        (TextClassificationModelOutput(), "BertForSequenceClassification", "labels"),
        (RegressionModelOutput(), "BertForSequenceClassification", None),
        (CausalLMModelOutput(), "GPT2LMHeadModel", None),
        (RowLossModelOutput(lambda outputs, batch: outputs), "BertForMultipleChoice", None),
    ],
)
def test_numbers_that_are_no_classes(task: Any, model: str, column: str | None) -> None:
    rows = Dataset.from_dict({"labels": [0, 3, 1]})
    features = SimpleNamespace(task=task, model=type(model, (), {})(), train_dataset=rows)
    assert trained_classes(features) == column


@pytest.mark.parametrize("kind", ["string", "large_string"])  # as a table and as pandas has texts
def test_labels_may_be_texts(kind: str) -> None:
    rows = Dataset.from_dict({"labels": ["a", "b", "a"]}).cast_column("labels", Value(kind))
    assert class_column(rows) == "labels"
    table = review_table(rows, [0.1, -1.0, 0.2], "labels", {1: "a"})
    assert fixed_dataset(table)["labels"][:] == ["a", "a", "a"]


def test_a_review_of_more_than_a_minute_says_so_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    train, validation, _ = digits()
    attributor = TrakAttributor.from_trainer(
        trainer_of(train.select(range(60)), tmp_path), TrakConfig(str(tmp_path / "trak")), "image_classification"
    ).featurize()
    attributor.review(validation.select(range(10)))
    assert "The review takes" not in caplog.text
    # A row a second: EK-FAC is fitted by now; one target and 60 rows, then 30 rows and 64 controls, and 60 rows.
    monkeypatch.setattr(type(attributor.features), "rate", lambda _: 1.0)
    attributor.review(validation.select(range(10)))
    assert "The review takes about 3 min 35 s" in caplog.text and "by Exact" in caplog.text
