"""The report of a training against trainings without the rows that it names, finite differences, and in a browser."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from replay_runs import EVAL, TRAIN, RowWeights, config, differences, recorded, tiny, trainer
from store_jobs import start_group
from test_report_browser import CONTRAST, DESKTOP, PHONE, requests_beyond
from test_report_browser import page as page  # the fixture
from training_reports import (
    HAND,
    NEAR,
    ROWS,
    TWICE,
    WEB,
    PlantedRun,
    language_losses_in_group,
    picture_trainer,
    planted_run,
    report_in_group,
    trainer_of,
)
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BertForTokenClassification,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from transformers.loss.loss_utils import ForCausalLMLoss

from hf_trak import Exact, Replay, TrakAttributor, TrakCallback, TrakConfig
from hf_trak.cli.main import main
from hf_trak.errors import NonFiniteError
from hf_trak.evaluation.intervals import Interval
from hf_trak.featurize import run_replaying
from hf_trak.featurize.run_replaying import RunReplay
from hf_trak.report import TrainingReport
from hf_trak.report.training import GroupEffect, _has_sources, _near, effects_of_training
from hf_trak.report.training_page import training_report, write_training_report


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> PlantedRun:
    return planted_run(tmp_path_factory.mktemp("training"))


@pytest.fixture(scope="module")
def report(run: PlantedRun) -> TrainingReport:
    """The report with its proof, written to `report.html`."""
    pytest.importorskip("scipy")

    def make(rows: Any, seed: int) -> Any:
        return trainer_of(rows, run.place / "proof")

    return training_report(
        run.attributor.features, run.validation, run.place / "report.html", make_trainer=make, title="A run"
    )


@pytest.mark.slow
def test_effects_of_tokens_are_those_of_trainings_with_other_weights(tmp_path: Path) -> None:
    """Central differences of the mean loss of a label by the weight of each row, in float64."""
    weights = RowWeights()

    def model() -> Any:
        made = tiny()
        made.loss_function = weights
        return made

    def loss(of: Any) -> torch.Tensor:
        tokens = torch.tensor(EVAL["input_ids"][:])
        with torch.no_grad():
            logits = of(input_ids=tokens).logits[:, :-1].flatten(0, 1)
        total = torch.nn.functional.cross_entropy(logits, tokens[:, 1:].flatten(), reduction="sum")
        return total[None] / tokens.numel()  # the trainer counts the first label of a GPT-2, too

    def train() -> torch.Tensor:
        other = trainer(tmp_path, model())
        other.train()
        return loss(other.model)

    first = recorded(tmp_path, model())
    attributor = TrakAttributor.from_trainer(first, config(tmp_path))
    found = training_report(attributor.features, EVAL, method=Replay(of="run", smoothing=0.0))
    first.model.loss_function = ForCausalLMLoss
    assert found.loss == pytest.approx(float(loss(first.model)), rel=1e-5)
    assert found.loss == pytest.approx(first.evaluate(EVAL)["eval_loss"], rel=1e-5)
    measured = differences(weights, train)[0].numpy()
    assert len(found.effects) == len(TRAIN) and np.abs(measured).min() > 0
    assert np.abs(found.effects - measured).max() <= 1e-6 * np.abs(measured).max()
    assert "call `featurize` first" in found.near and found.doubts == 0 and found.sources == ()
    assert "text" not in write_training_report(found, attributor.features, tmp_path / "page.html").name


def of_tokens(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    """A mean over the labels of a batch, twice the cross-entropy."""
    total = torch.nn.functional.cross_entropy(outputs.logits.flatten(0, 1), labels.flatten(), reduction="sum")
    return 2 * total / ((labels != -100).sum() if num_items_in_batch is None else num_items_in_batch)


def weighted(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    """A mean over labels by the weights of their classes."""
    weight = torch.tensor([0.5, 3.0, 10.0], dtype=torch.float64)
    return torch.nn.functional.cross_entropy(outputs.logits.flatten(0, 1), labels.flatten(), weight)


def smoothed(outputs: Any, labels: torch.Tensor) -> torch.Tensor:
    log_probs, counted = outputs.logits.log_softmax(2), labels != -100
    own = -log_probs.gather(2, labels.clamp(min=0)[..., None])[..., 0]
    return ((0.9 * own - 0.1 * log_probs.mean(2)) * counted).sum() / counted.sum()


@pytest.mark.parametrize("case", ["regression", "smoothed", "function", "weighted"])
def test_losses_and_effects_of_trainings_by_other_losses(tmp_path: Path, case: str) -> None:
    """After one step of gradient descent with all rows: plain autograd, and the loss that the trainer evaluates."""
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    kind = BertForSequenceClassification if case == "regression" else BertForTokenClassification
    draws = torch.Generator().manual_seed(0)

    def rows(count: int) -> Dataset:
        ids = torch.randint(1, 20, (count, 5), generator=draws)
        labels: Any = (ids % 3).masked_fill(torch.rand(ids.shape, generator=draws) < 0.4, -100)
        labels[:, 0] = 1
        labels = ids.sum(1) / 30 if case == "regression" else labels
        return Dataset.from_dict({"input_ids": ids.tolist(), "labels": labels.tolist()})

    losses = {"regression": lambda outputs, labels: (outputs.logits[:, 0] - labels).square().mean(),
              "smoothed": smoothed, "function": of_tokens, "weighted": weighted}  # fmt: skip

    def gradient(model: Any, given: Dataset, times: float = 1.0) -> tuple[torch.Tensor, float]:
        labels = torch.tensor(given["labels"][:])
        loss = times * losses[case](model(input_ids=torch.tensor(given["input_ids"][:])), labels)
        weights = [one for one in model.parameters() if one.requires_grad]
        found = torch.autograd.grad(loss, weights, allow_unused=True, materialize_grads=True)
        return torch.cat([one.flatten() for one in found]), loss.item()

    train, validation = rows(6), rows(4)
    torch.manual_seed(0)
    labels = 1 if case == "regression" else 3
    model = kind(BertConfig(vocab_size=20, num_labels=labels, hidden_dropout_prob=0.0,
                            attention_probs_dropout_prob=0.0, **sizes)).double()  # fmt: skip
    each = [0.5, 3.0, 10.0] if case == "weighted" else [1.0] * 3
    counts = torch.tensor(
        [sum(each[one] for one in row if one != -100) if labels > 1 else 1 for row in train["labels"]]
    )
    parts = [gradient(model, train.select([row]), float(counts[row] / counts.sum()))[0] for row in range(6)]
    options = TrainingArguments(
        str(tmp_path / "out"), optim="sgd", learning_rate=0.1, max_grad_norm=0.0, num_train_epochs=1,
        per_device_train_batch_size=6, per_device_eval_batch_size=4, lr_scheduler_type="constant", report_to=[],
        save_strategy="no", disable_tqdm=True, use_cpu=True, label_smoothing_factor=0.1 * (case == "smoothed"),
    )  # fmt: skip
    own = {"compute_loss_func": losses[case]} if case in ("function", "weighted") else {}
    run = Trainer(model, options, train_dataset=train, eval_dataset=validation, **own)
    run.add_callback(TrakCallback(config(tmp_path), record=True))
    run.train()
    model.eval()
    after, loss = gradient(model, validation)
    attributor = TrakAttributor.from_trainer(run, config(tmp_path))
    found = training_report(attributor.features, validation, method=Replay(of="run", smoothing=0.0))
    assert found.loss == pytest.approx(loss, rel=1e-6) == run.evaluate()["eval_loss"]
    expected = torch.stack([-0.1 * part @ after for part in parts]).numpy()
    np.testing.assert_allclose(found.effects, expected, rtol=1e-5, atol=1e-6 * np.abs(expected).max())


@pytest.mark.slow
def test_a_report_goes_on_without_a_replay_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failed(*given: Any) -> None:
        raise NonFiniteError("The derivatives are NaN.")

    attributor = TrakAttributor.from_trainer(recorded(tmp_path), config(tmp_path))
    monkeypatch.setattr(RunReplay, "plan", failed)
    found = training_report(attributor.features, EVAL)
    assert found.method.startswith("exact scores") and "The derivatives are NaN." in found.warnings[0]
    with pytest.raises(NonFiniteError):
        training_report(attributor.features, EVAL, method=Replay(of="run"))


@pytest.mark.slow
def test_trainings_without_rows(run: PlantedRun, report: TrainingReport) -> None:
    """What is predicted for leaving rows out is what the trainer measures, in sign, order and size."""
    web = list(range(ROWS - WEB, ROWS))
    parts = [web, run.wrong.tolist(), report.harmful(10), report.helpful(10)]
    predicted = np.array([-report.effects[part].sum() for part in parts])
    measured = np.array([run.change_without(part).mean() for part in parts])
    assert report.loss == pytest.approx(run.losses(run.trainer.model).mean(), rel=1e-5)
    assert (measured[:3] < 0).all() and measured[3] > 0
    assert ((predicted / measured > 0.5) & (predicted / measured < 2.5)).all()


@pytest.mark.slow
def test_a_loss_below_zero_is_called_impossible(run: PlantedRun, report: TrainingReport, tmp_path: Path) -> None:
    wild = replace(report, effects=1000 * report.effects).scaled()
    assert report.scaled() is report and not report.impossible
    assert np.abs(wild.effects).max() == 1 and wild.harmful(9) == report.harmful(9)
    by = 1000 * np.abs(report.effects).max()
    assert [one.effect * by for one in wild.labels] == pytest.approx([one.effect for one in report.labels])
    assert "is below 0" in wild.impossible and wild.impossible in str(wild)
    page = write_training_report(wild, run.attributor.features, tmp_path / "page.html").read_text()
    assert wild.impossible in page and "in units of the mean loss" not in page
    assert "predicted" in str(report.proof) and "predicted" not in str(wild.proof)


@pytest.mark.slow
def test_warnings_of_a_replay_and_the_report_before_are_on_the_page(
    run: PlantedRun, report: TrainingReport, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_replaying, "warnings_of", lambda *found: ["Weights <every> 9 steps are too few."])
    old = (GroupEffect("<old>", 3, 1.5),)
    before = replace(report, losses=report.losses + 0.25, doubted={}, sources=old, method="replay of the recorded run")
    features = run.attributor.features
    chosen = training_report(features, run.validation, tmp_path / "chosen.html")
    assert chosen.method.startswith("exact scores") and "is left alone" in (tmp_path / "chosen.html").read_text()
    found = training_report(features, run.validation, tmp_path / "page.html", method=Replay(of="run"), earlier=before)
    assert found.method.startswith("replay") and found.warnings == ("Weights <every> 9 steps are too few.",)
    assert found.warnings[0] in str(found)
    page = (tmp_path / "page.html").read_text()
    assert "Weights &lt;every&gt; 9 steps are too few." in page
    rows = {name: (was, now) for name, was, now in found.compared}
    loss = f"{report.loss:.4g} (-0.25, -0.25 to -0.25)"
    assert rows["validation loss"] == (f"{report.loss + 0.25:.4g}", loss) and loss in page
    assert rows["doubted labels"] == ("0", str(len(found.doubted))) and len(found.doubted) > 0
    assert rows["source <old>"] == ("+1.5", "no row") and "source &lt;old&gt;" in page
    assert f"validation loss: {report.loss + 0.25:.4g} before, {loss} now" in str(found)
    for one in (replace(found, earlier=replace(before, relative=True)), replace(found, relative=True)):
        assert not [name for name, *_ in one.compared if name.startswith(("source", "label "))]
    exact = replace(found, earlier=replace(before, method="exact scores")).compared
    assert exact[-1] == ("effects, which do not compare", "by exact scores", f"by {found.method}")
    assert not [name for name, *_ in exact if name.startswith(("source", "label ", "doubted"))]
    others = run.validation.select([*range(1, len(run.validation)), 0])  # as many, in another order
    for rows in (others, run.validation.select(range(2))):
        with pytest.raises(
            ValueError, match=rf"other validation rows .* which has {len(rows)}.*Expected the same rows"
        ):
            effects_of_training(features, rows, earlier=report)


@pytest.mark.slow
def test_a_training_with_another_rate(run: PlantedRun, report: TrainingReport) -> None:
    measured = run.change_without([], rate=1.1e-2).mean()
    assert report.settings["learning rate"] == pytest.approx(measured, rel=0.5)
    assert set(report.settings) == {"learning rate", "weight decay"}


@pytest.mark.slow
def test_what_was_planted_is_found(run: PlantedRun, report: TrainingReport) -> None:
    assert report.sources[0].value == "web" and report.sources[0].effect > 0 and report.sources[0].rows == WEB
    assert all(one.effect < 0 for one in report.sources[1:])
    for groups in (report.sources, report.labels):
        assert sum(one.effect for one in groups) == pytest.approx(report.effects.sum())
        assert sum(one.rows for one in groups) == len(run.train)
    found = [row for row in run.wrong if row in report.doubted]
    assert len(found) >= 0.7 * len(run.wrong)
    planted = {*run.wrong, *range(ROWS - WEB, ROWS)}
    assert sum(row in planted for row in report.doubted) >= 0.8 * len(report.doubted)
    named = [report.doubted[row] == f"digit {run.right[row]}" for row in report.doubted if row < ROWS]
    assert np.mean(named) >= 0.7
    assert report.repeated == {ROWS: TWICE[0], ROWS + 1: TWICE[1]}
    copies = {(row, ROWS + 2 + place) for place, row in enumerate(NEAR)}
    assert not isinstance(report.near, str) and {pair[:2] for pair in report.near} == copies
    assert report.method == "replay of the recorded run, Gauss-Newton" and report.passes > 0


@pytest.mark.slow
def test_the_proof_is_what_the_trainer_measures(run: PlantedRun, report: TrainingReport) -> None:
    proof, rows = report.proof, report.harmful(12)
    assert proof is not None and proof.removed == 12
    assert proof.predicted == pytest.approx(-report.effects[rows].sum())
    changes = run.change_without(rows)
    assert proof.measured.value == pytest.approx(changes.mean(), rel=1e-3)
    error = changes.std() / np.sqrt(len(changes))
    assert proof.measured.high - proof.measured.low == pytest.approx(2 * 1.96 * error, rel=0.2)
    assert proof.difference.high < 0
    assert proof.difference.value == pytest.approx(proof.measured.value - proof.measured_random.value)
    assert "random" in str(report) and "web" in str(report)
    unproved = "do not remove rows without a proof"
    assert unproved in str(replace(report, proof=None)) and unproved not in str(report)
    assert "probably wrong labels: " in str(report)
    assert "labels are looked at where a row has one class" in str(replace(report, labels=()))
    assert "harmful the model is better than without random ones" in proof.verdict and "Do not" not in proof.verdict
    assert str(report).splitlines()[2] == proof.verdict and proof.verdict in (run.place / "report.html").read_text()
    for low, high, said in ((0.1, 0.3, "is worse"), (-0.1, 0.1, "is no better")):
        other = replace(proof, difference=Interval((low + high) / 2, low, high)).verdict
        assert f"{said} than" in other and other.endswith("Do not remove rows by these effects.")


@pytest.mark.slow
def test_the_page_in_a_browser(run: PlantedRun, report: TrainingReport, page: Any) -> None:
    path = run.place / "report.html"
    for size, scheme in ((PHONE, "dark"), (DESKTOP, "light")):
        page.media(prefers_color_scheme=scheme)
        page.size(*size, mobile=size == PHONE)
        page.open(path)
        assert page.complaints == [] and requests_beyond(page, path) == []
        assert page.evaluate("document.documentElement.scrollWidth") == size[0]
        cut = "[...document.querySelectorAll('main *')].filter(e => e.getBoundingClientRect().right > innerWidth + 1)"
        assert page.evaluate(f"{cut}.filter(e => !e.closest('.hush')).length") == 0
        assert {name: ratio for name, ratio in page.evaluate(CONTRAST).items() if ratio < 4.5} == {}
    headings = page.evaluate("[...document.querySelectorAll('h1,h2')].map(e => e.textContent)")
    assert headings == ["A run", "Rows", "Sources", "Labels", "Labels and duplicates", "Proof", "Run"]
    sources = page.evaluate("[...document.querySelectorAll('#sources tbody th')].map(e => e.textContent)")
    assert sources == [one.value for one in report.sources] and HAND in sources  # shown as text
    shown = page.evaluate("[...document.querySelectorAll('#rows .harmed .row')].map(e => e.textContent)")
    assert shown == [f"row {row}" for row in report.harmful(5)]
    assert page.evaluate("document.querySelectorAll('#doubts .example').length") == min(24, len(report.doubted))
    assert page.evaluate("document.querySelectorAll('#proof tbody tr').length") == 3
    assert "10 % more learning rate" in page.evaluate("document.querySelector('#facts').textContent")


@pytest.mark.slow
@pytest.mark.usefixtures("jobs_with_one_thread")
def test_two_processes_report_a_training_on_images(tmp_path: Path) -> None:
    """They write one page, with the pictures, and a single process finds the same effects in their record."""
    both = [job.wait() for job in start_group(tmp_path, 2, report_in_group, str(tmp_path), timeout=60)]
    assert both[0] == both[1] and both[0] is not None and "value" in both[0], both
    found = both[0]["value"]
    page = (tmp_path / "trak" / "training_report.html").read_text()
    assert found["method"] == "replay of the recorded run" and page.count("data:image") > 1
    alone = picture_trainer(tmp_path)
    alone.model.load_state_dict(torch.load(tmp_path / "last.pt", weights_only=True))
    args = TrakConfig(str(tmp_path / "trak"), use_cpu=True)
    attributor = TrakAttributor.from_trainer(alone, args, "image_classification")
    again = training_report(attributor.features, alone.eval_dataset, method=Replay(of="run"))
    assert np.abs(again.effects).max() > 0
    assert np.abs(again.effects - found["effects"]).max() <= 1e-4 * np.abs(again.effects).max()


@pytest.mark.slow
@pytest.mark.usefixtures("jobs_with_one_thread")
def test_two_processes_report_the_loss_of_a_language_model(tmp_path: Path) -> None:
    """Its tokens are counted once, although a trainer adds those of all processes up."""
    found = [
        one["value"]
        for job in start_group(tmp_path, 2, language_losses_in_group, str(tmp_path))
        if (one := job.wait())
    ]
    alone = language_losses_in_group(str(tmp_path / "alone"))
    assert len(found) == 2
    for one in (*found, alone):
        assert one["loss"] == pytest.approx(one["by_hand"], rel=1e-5)
        assert one["effects"] == pytest.approx(alone["effects"], rel=1e-4)


@pytest.mark.slow
def test_products_of_gradients(run: PlantedRun) -> None:
    """Without curvature, effects are products of the gradients of losses, by autograd."""
    found = training_report(run.attributor.features, run.validation, method=Exact("identity"))
    model, names = run.trainer.model, list(run.attributor.features.layout.names)
    parameters = [dict(model.named_parameters())[name] for name in names]

    def gradient(rows: Any) -> torch.Tensor:
        batch = {name: torch.tensor(rows[name][:]) for name in ("pixels", "labels")}
        return torch.cat([one.flatten() for one in torch.autograd.grad(model(**batch).loss, parameters)])

    whole = gradient(run.validation)
    products = np.array([float(gradient(run.train.select([row])) @ whole) for row in range(20)])
    expected = -products / len(run.train)
    assert np.abs(found.effects[:20] - expected).max() <= 1e-4 * np.abs(expected).max()
    assert found.settings == {} and found.method.startswith("exact scores")


@pytest.mark.slow
def test_a_run_without_a_record_is_scored_exactly(
    run: PlantedRun, report: TrainingReport, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    attributor = TrakAttributor.from_trainer(run.trainer, config(tmp_path), "image_classification")
    with caplog.at_level("INFO", "hf_trak.report.training"):
        found = training_report(attributor.features, run.validation, tmp_path / "page.html", train_group_by="labels")
    (line,) = [one.getMessage() for one in caplog.records if one.name == "hf_trak.report.training"]
    assert line.startswith("The report takes Exact(curvature='ekfac'), ")
    assert f"passes over {len(attributor.train_dataset):,} rows: about " in line
    assert found.method.startswith("exact scores") and isinstance(found.near, str) and found.settings == {}
    assert np.corrcoef(found.effects, report.effects)[0, 1] > 0.5
    assert [one.value for one in found.sources] == [one.value for one in found.labels]
    text = (tmp_path / "page.html").read_text()
    assert "pass <code>make_trainer</code>" in text and "call `featurize` first" in text and "Proof" not in text


@pytest.mark.slow
def test_the_callback_reports_when_training_ends(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The weights are those of a training without it, and checkpoints are featurized afterwards under any id."""
    told: list[str] = []
    monkeypatch.setattr("hf_trak.callbacks.say", lambda _, text: told.append(text))
    plain = trainer(tmp_path / "plain")
    plain.train()
    run = trainer(tmp_path / "run", save_strategy="steps", save_steps=4)
    run.eval_dataset = EVAL
    callback = TrakCallback(config(tmp_path), name="mine", record=True, trainer=run, report=True)
    run.add_callback(callback)
    run.train()
    assert all(torch.equal(*pair) for pair in zip(run.model.parameters(), plain.model.parameters(), strict=True))
    assert callback.report is not None and callback.report.method == "replay of the recorded run"
    page = tmp_path / "trak" / "training_report.html"
    assert "Raised the loss most" in page.read_text()
    price, done = told  # before the training, and after it
    assert "five to ten times as long as training" in price and done == f"{callback.report}\nThe page is {page}."
    attributor = TrakAttributor.from_trainer(run, config(tmp_path)).featurize(callback.checkpoints[:1])
    # of the last weights all the same
    again = training_report(attributor.features, EVAL, method=Replay(of="run", name="mine"))
    assert np.array_equal(again.effects, callback.report.effects) and isinstance(again.near, tuple)
    assert main(["inspect", str(tmp_path / "trak"), "--check"]) == 0
    assert " 0 missing" in capsys.readouterr().out  # of a store that has no features


@pytest.mark.slow
def test_the_callback_leaves_a_run_alone_that_speaks_against_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one with a name of its own."""
    monkeypatch.setattr("hf_trak.trajectory.guards.GROWTH", 0.0)
    run = trainer(tmp_path)
    run.eval_dataset = EVAL
    callback = TrakCallback(config(tmp_path), name="mine", record=True, trainer=run, report=True)
    run.add_callback(callback)
    run.train()
    assert callback.report is not None and callback.report.method.startswith("exact scores")
    text, before = callback.report.warnings
    assert text.startswith("The recorded run is left alone") and "grew" in text
    assert before.startswith("The recorded run is replayed by its Gauss-Newton matrix") and "grew" in before


@pytest.mark.slow
def test_a_record_without_a_loss_is_left_alone(tmp_path: Path) -> None:
    """The trainer computed it itself, and the attributor has the model alone."""
    run = trainer(tmp_path, callbacks=[TrakCallback(config(tmp_path), record=True)])
    run.compute_loss_func = lambda outputs, labels, num_items_in_batch=None: outputs.logits.square().mean()
    run.train()
    attributor = TrakAttributor(run.model, config(tmp_path), run.train_dataset, task="causal_lm")
    found = effects_of_training(attributor.features, EVAL)
    assert found.method.startswith("exact scores")
    assert found.warnings[0].startswith("The recorded run is left alone, and EK-FAC is taken. The record has no loss")


@pytest.mark.slow
def test_a_training_is_not_lost_to_its_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One that cannot be made is refused before, and one that fails is an error in the log."""

    def failed(*_: Any, **__: Any) -> None:
        raise NonFiniteError("A loss is NaN.")

    run = trainer(tmp_path)
    run.eval_dataset = EVAL
    monkeypatch.setattr("hf_trak.report.training_page.training_report", failed)
    callback = TrakCallback(config(tmp_path), trainer=run, report=True)
    run.add_callback(callback)
    run.train()
    assert (
        callback.report is None and "The training is done, and there is no report of it. A loss is NaN." in caplog.text
    )
    other = trainer(tmp_path / "other")
    other.eval_dataset = EVAL
    task = lambda outputs, batch: outputs.logits.mean((1, 2))  # noqa: E731
    other.add_callback(TrakCallback(config(tmp_path / "other"), trainer=other, report=True, task=task))
    with pytest.raises(TypeError, match="has no loss of every row"):
        other.train()
    assert other.state.global_step == 0


class Dashboard(TrainerCallback):
    """Keeps what a trainer logs until it is closed when training ends, as those of `report_to` do."""

    def __init__(self) -> None:
        self.logged: dict[str, Any] = {}
        self.open = True

    def on_log(self, *_: Any, logs: dict[str, Any], **__: Any) -> None:
        assert self.open
        self.logged |= logs

    def on_train_end(self, *_: Any, **__: Any) -> None:
        self.open = False


@pytest.mark.slow
def test_the_trainer_logs_the_tables_while_its_dashboards_are_open(tmp_path: Path, capsys: Any) -> None:
    dashboard, labelled = Dashboard(), TRAIN.add_column("source", ["a|b\n<i>", "book"] * (len(TRAIN) // 2))
    run = trainer(tmp_path)
    run.train_dataset, run.eval_dataset = labelled, EVAL
    run.add_callback(dashboard)
    callback = TrakCallback(config(tmp_path), record=True, trainer=run, report=True)
    run.add_callback(callback)
    run.train()
    found, logged = callback.report, dashboard.logged
    assert found is not None and not dashboard.open
    assert logged["report/validation_loss"] == found.loss
    assert logged["report/10 % more learning rate"] == found.settings["learning rate"]
    head, rule, *lines = logged["report/sources"].splitlines()
    assert head == "| sources | rows | effect | per row |" and rule.count("---") == 4
    assert {line.split(" | ")[0] for line in lines} == {"| a&#124;b &lt;i&gt;", "| book"}
    first = found.harmful(1)[0]
    assert logged["report/rows"].splitlines()[2] == f"| {first} | {found.effects[first]:+.3g} |"
    assert "report/labels" not in logged and "report/proof" not in logged
    printed = capsys.readouterr().out  # where the trainer prints what it logs
    assert "report/validation_loss" in printed and "report/sources" not in printed and "| ---" not in printed


@pytest.mark.slow
def test_a_callback_that_has_nothing_to_report_is_refused_before_training(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="`report` is set without a `trainer`"):
        TrakCallback(config(tmp_path), report=True)
    run = trainer(tmp_path)
    run.add_callback(TrakCallback(config(tmp_path), record=True, trainer=run, report=True))
    with pytest.raises(TypeError, match="`eval_dataset` of the trainer is a NoneType"):
        run.train()
    assert run.state.global_step == 0


def near_of(gradients: torch.Tensor, repeated: dict[int, int]) -> tuple[tuple[int, int, float], ...] | str:
    """Ask for near duplicates of rows with these features, in two shards."""

    class Shards(list[Any]):
        def unwritten(self) -> list[int]:
            return []

    ends = [(0, 20), (20, len(gradients))]
    shards = Shards(SimpleNamespace(start=a, stop=b, grads=gradients[a:b]) for a, b in ends)
    features: Any = SimpleNamespace(store=SimpleNamespace(model_ids=[0], train=lambda _: shards))
    return _near(features, np.linspace(1, 2, len(gradients)), repeated)


def test_rows_of_arrays_and_sounds_that_were_selected(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """They have no text. Sounds are played; a page has one for each row it shows. Its price is said first."""
    caplog.set_level("INFO", logger="hf_trak")
    rng = np.random.default_rng(0)
    rows = [{"pixels": one.tolist(), "labels": int(i % 3)} for i, one in enumerate(rng.random((24, 64)))]
    tone = {"array": [0.0, 0.5, -0.5], "sampling_rate": 8000}
    for name, made in (("arrays", rows), ("sounds", [{**row, "sound": tone} for row in rows])):
        train = Dataset.from_list(made).select(range(20))
        trainer = trainer_of(train, tmp_path)
        args = TrakConfig(str(tmp_path / name), use_cpu=True)
        features = TrakAttributor.from_trainer(trainer, args, "image_classification").features
        page = tmp_path / f"{name}.html"
        found = training_report(features, train.select(range(5)), page, method="exact", examples=2)
        assert len(found.labels) == 3 and found.doubts > 0
        assert "The report takes Exact(" in caplog.text and "for labels that may be wrong." in caplog.text
        caplog.clear()
        assert page.read_text().count("<audio") == (0 if name == "arrays" else 4 + len(found.doubted))


def test_a_loss_of_rows_that_has_no_labels_to_draw(tmp_path: Path) -> None:
    """The default method is exact, with the labels of the rows. Losses are what the model returns for each alone."""
    run = trainer(tmp_path)
    features = TrakAttributor.from_trainer(run, config(tmp_path), task="row_loss").features
    found = training_report(features, EVAL, tmp_path / "page.html", method="exact")
    rows = [{name: torch.tensor([row[name]]) for name in ("input_ids", "labels")} for row in EVAL]
    with torch.no_grad():
        alone = [float(run.model.eval()(**row).loss) for row in rows]
    assert found.losses.tolist() == pytest.approx(alone, rel=1e-6)


def test_a_model_that_makes_its_own_decoder_inputs(tmp_path: Path) -> None:
    """Rows have nothing but labels, from which the model's own method makes them. Nothing is featurized."""
    torch.manual_seed(0)
    sizes = {"d_model": 8, "d_kv": 4, "d_ff": 16, "num_layers": 1, "num_heads": 2, "dropout_rate": 0.0}
    model = T5ForConditionalGeneration(T5Config(vocab_size=20, decoder_start_token_id=0, **sizes))
    ids = torch.randint(1, 20, (12, 5)).tolist()
    rows = Dataset.from_list([{"input_ids": one, "labels": one[::-1]} for one in ids])
    arguments = TrainingArguments(str(tmp_path / "out"), use_cpu=True, report_to=[], max_steps=2, disable_tqdm=True)
    run = Trainer(model, arguments, train_dataset=rows, eval_dataset=rows.select(range(4)))
    run.train()
    features = TrakAttributor.from_trainer(run, config(tmp_path)).features
    found = training_report(features, run.eval_dataset, tmp_path / "page.html", method="exact")
    assert float(found.losses.mean()) == pytest.approx(run.evaluate()["eval_loss"], rel=1e-5)


def test_opposite_features_are_no_duplicates() -> None:
    """Nor does a cosine say anything where all rows have one of ±1."""
    gradients = torch.randn((50, 30), generator=torch.Generator().manual_seed(0))
    gradients[30], gradients[31], gradients[32] = -2 * gradients[3], 3 * gradients[4] + 0.01, gradients[5]
    found = near_of(gradients, {32: 5})
    pairs = {
        (i, j): float(gradients[i] @ gradients[j] / gradients[i].norm() / gradients[j].norm())
        for i in range(50)
        for j in range(i + 1, 50)
    }
    assert pairs[3, 30] < -0.999 and [pair for pair, cosine in pairs.items() if cosine > 0.995] == [(4, 31), (5, 32)]
    assert not isinstance(found, str) and [pair[:2] for pair in found] == [(4, 31)]
    assert found[0][2] == pytest.approx(pairs[4, 31], abs=1e-5)
    for directions in (torch.tensor([[1.0], [-1.0]]) * gradients[:1], gradients[:3]):  # of two classes, and of three
        classes = directions.repeat(25, 1)[:50] + 1e-3 * gradients
        said = near_of(classes, {})
        shares = [i % len(directions) == j % len(directions) for i in range(50) for j in range(i + 1, 50)]
        assert isinstance(said, str) and f"{np.mean(shares):.0%} of the pairs drawn at random have" in said
    others = torch.randn((40, 30), generator=torch.Generator().manual_seed(1))
    repeated = dict.fromkeys(range(40, 50), 0)  # exact duplicates, which are found otherwise
    assert near_of(torch.cat([others, others[:1].repeat(10, 1)]), repeated) == ()


@pytest.mark.parametrize("source", [[[1]], ["a"], [0.5]])
def test_columns_named_source_that_group_nothing(source: list[Any]) -> None:
    assert _has_sources(Dataset.from_dict({"source": ["web", "web", "book", "book"]}))
    texts = [f"{source[0]}{row}" for row in range(4)] if source == ["a"] else source * 4
    assert not _has_sources(Dataset.from_dict({"source": texts}))


def test_what_is_refused(tmp_path: Path) -> None:
    run = trainer(tmp_path, tiny(torch.float32))
    attributor = TrakAttributor.from_trainer(run, config(tmp_path))
    for method in ("index", "rerank", Exact("hybrid")):
        with pytest.raises(ValueError, match="whose scores are changes of a loss"):
            training_report(attributor.features, EVAL, method=method)
    with pytest.raises(ValueError, match="`train_group_by` is 'domain'"):
        training_report(attributor.features, EVAL, train_group_by="domain")
    with pytest.raises(TypeError, match="Expected a `datasets"):
        training_report(TrakAttributor(tiny(), config(tmp_path / "a"), list(TRAIN)).features, EVAL)
    output = TrakAttributor(tiny(), config(tmp_path / "b"), TRAIN, task=lambda out, batch: out.logits.mean((1, 2)))
    with pytest.raises(TypeError, match="no loss of every row"):
        training_report(output.features, EVAL)
