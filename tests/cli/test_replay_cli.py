"""Replayed scores from the command line: the trainer from a checkpoint and JSON, the run from its record."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset, load_from_disk
from doc_examples import write_reviews
from transformers import BertForSequenceClassification, Trainer, TrainingArguments

from hf_trak import Replay, TrakAttributor, TrakConfig
from hf_trak.callbacks import TrakCallback
from hf_trak.cli.build import build
from hf_trak.cli.main import main
from hf_trak.cli.parser import DataArguments, ModelArguments, parse_yaml_and_args
from hf_trak.report import training_report
from hf_trak.report.run import AttributionRun
from hf_trak.viewer.page import facts_page
from hf_trak.viewer.session import RunSession

OPTIONS = {"learning_rate": 1e-2, "weight_decay": 0.1, "lr_scheduler_type": "cosine", "warmup_steps": 3}
INLINE = "learning_rate=1e-2,weight_decay=.1,lr_scheduler_type=cosine,warmup_steps=3"
ASKED = ("attribute", "--use_cpu", "--train_dataset", "reviews.jsonl", "--eval_dataset", "mine.jsonl", "--all_scores")


@pytest.fixture
def trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Trainer:
    """A trained model with checkpoints after 5, 10 and 15 steps in `out`, and the record of its run in `trak`."""
    write_reviews(tmp_path)
    monkeypatch.chdir(tmp_path)
    none = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    torch.manual_seed(0)
    model = BertForSequenceClassification.from_pretrained("model", **none)
    model.save_pretrained("model")
    names = ["--model", "model", "--train_dataset", "reviews.jsonl"]
    built = build(
        *parse_yaml_and_args((ModelArguments, DataArguments), names), TrakConfig("unused", use_cpu=True, budget="fast")
    )
    arguments = TrainingArguments(
        "out", per_device_train_batch_size=8, num_train_epochs=3, save_steps=5, logging_steps=5, use_cpu=True,
        report_to=[], disable_tqdm=True, **OPTIONS,
    )  # fmt: skip
    callback = TrakCallback(TrakConfig("trak", use_cpu=True, budget="fast"), record=True)
    made = Trainer(
        model, arguments, train_dataset=built.preparation.prepare(Dataset.from_json("reviews.jsonl")),
        processing_class=built.preparation.processing_class, callbacks=[callback],
        data_collator=built.preparation.collator,
    )  # fmt: skip
    made.train()
    Path("args.json").write_text(arguments.to_json_string())
    Path("targets").mkdir()
    built.preparation.prepare(Dataset.from_json("mine.jsonl")).save_to_disk("targets")
    return made


def asked(capsys: pytest.CaptureFixture[str], *options: str) -> tuple[int, str]:
    """The exit status, and the run or the error."""
    code = main([*ASKED, *options, "--json"])
    printed = capsys.readouterr()
    return code, json.loads(printed.out)["run"] if code == 0 else printed.err


def library(trainer: Trainer, place: str, method: Replay) -> Any:
    attributor = TrakAttributor.from_trainer(trainer, TrakConfig(place, use_cpu=True, budget="fast"))
    return attributor.attribute(load_from_disk("targets"), top_k=None, method=method)["trak_scores"][:]


@pytest.mark.slow
@pytest.mark.parametrize("given", ["args.json", INLINE])
def test_a_recipe_from_a_checkpoint(trainer: Trainer, capsys: pytest.CaptureFixture[str], given: str) -> None:
    """Batch size and steps come from `trainer_state.json`, the rest from the arguments."""
    place = ("--model", "out/checkpoint-15", "--output_dir", "recipe", "--method", "replay", "--replay_rows", "5")
    code, run = asked(capsys, *place, "--training_args", given)
    assert code == 0, run
    saved = AttributionRun.load(run)
    expected = np.array(library(trainer, "library", Replay(rows=5)))
    found = np.array(saved.scored["trak_scores"][:])
    assert np.allclose(found, -np.sort(-expected, axis=1)[:, : found.shape[1]], rtol=1e-4)
    assert saved.facts["projection"] == "none: replay of the recipe, gauss-newton of 5 rows of each step"
    assert saved.self_influence is None
    assert main(["report", run]) == 0
    assert "replay of the recipe" in Path(run, "report.html").read_text(encoding="utf-8")


@pytest.mark.slow
@pytest.mark.parametrize("recorded", [True, False])
def test_a_run_from_its_record_or_its_checkpoints(
    trainer: Trainer, capsys: pytest.CaptureFixture[str], recorded: bool
) -> None:
    options = [] if recorded else ["--training_args", "args.json", "--replay_start", "model"]
    place = ("--model", "out/checkpoint-15", "--output_dir", "trak" if recorded else "other")
    code, run = asked(capsys, *place, "--method", "replay", "--replay", "run", *options)
    assert code == 0, run
    method = Replay(of="run") if recorded else Replay(of="run", name="none", start="model")
    expected = np.array(library(trainer, "trak", method))
    session = RunSession(AttributionRun.load(run))
    found = np.array(session.run.scored["trak_scores"][:])
    assert np.allclose(found, -np.sort(-expected, axis=1)[:, : found.shape[1]], rtol=1e-4)
    assert session.answer(0).scores.max() == found[0, 0]
    shown = facts_page(session)
    assert "replay of the run, hessian of 100% of the rows of each step" in shown
    assert "10 % more changes the targets&#39; outputs by" in shown
    capsys.readouterr()
    assert main(["inspect", "trak"]) == 0
    assert "recorded training run: 15 steps, weights at 16 of them" in capsys.readouterr().out


@pytest.mark.slow
def test_what_is_not_known_is_asked_for_by_name(trainer: Trainer, capsys: pytest.CaptureFixture[str]) -> None:
    replay = ("--method", "replay", "--output_dir", "refused")
    trained, start = ("--model", "out/checkpoint-15"), ("--model", "model")
    assert "the run's `learning_rate` is not known" in asked(capsys, *trained, *replay)[1]
    wanted = "the run's `learning_rate`, `per_device_train_batch_size`, `num_train_epochs` are not known"
    assert wanted in asked(capsys, *start, *replay)[1]
    refused = {
        "learning_rate=1e-3": "the trainer logged",
        "adam=1": "'adam' is no file, and no argument",
        "lost.json": "'lost.json' is no file, and no argument",
        "reviews.jsonl": "reviews.jsonl is no JSON",
    }
    for given, message in refused.items():
        code, said = asked(capsys, *trained, *replay, "--training_args", given)
        assert code != 0
        assert message in said
    Path("smoothed.json").write_text(json.dumps({"label_smoothing_factor": 0.1}))
    assert "`label_smoothing_factor`" in asked(capsys, *trained, *replay, "--training_args", "smoothed.json")[1]
    code, said = asked(capsys, *trained, "--output_dir", "refused", "--replay_rows", "5")
    assert "`method` is 'auto', which has no such option. Expected the method replay" in said
    code, said = asked(capsys, *start, "--output_dir", "refused", "--method", "replay", "--replay", "run")
    assert code != 0
    assert "TrakCallback(record=True)" in said


@pytest.mark.slow
def test_the_report_of_a_training_and_its_proof(trainer: Trainer, capsys: pytest.CaptureFixture[str]) -> None:
    """The trainings of the proof are those that the trainer's own code would make, to the bit."""
    ask = [
        "report", "--training", "--model", "out/checkpoint-15", "--train_dataset", "reviews.jsonl", "--eval_dataset",
        "mine.jsonl", "--output_dir", "trak", "--use_cpu", "--title", "From a shell", "--json",
    ]  # fmt: skip
    before = sorted(path.name for path in Path("out").iterdir())
    assert main([*ask, "--training_args", "args.json", "--prove_from", "model"]) == 0
    found = json.loads(capsys.readouterr().out)

    def make(rows: Any, seed: int) -> Trainer:
        arguments = TrainingArguments(
            "again", per_device_train_batch_size=8, num_train_epochs=3, use_cpu=True, report_to=[], disable_tqdm=True,
            save_strategy="no", **OPTIONS,
        )  # fmt: skip
        model = BertForSequenceClassification.from_pretrained("model")
        return Trainer(model, arguments, train_dataset=rows, data_collator=trainer.data_collator)

    attributor = TrakAttributor.from_trainer(trainer, TrakConfig("trak", use_cpu=True), "text_classification")
    expected = training_report(attributor.features, load_from_disk("targets"), make_trainer=make)
    assert found["effects"] == pytest.approx(expected.effects.tolist(), rel=1e-4)
    assert found["method"] == "replay of the recorded run" and expected.proof is not None
    for name in ("measured", "measured_random", "difference"):
        assert found["proof"][name]["value"] == pytest.approx(getattr(expected.proof, name).value, rel=1e-4)
    assert sorted(path.name for path in Path("out").iterdir()) == before
    page = Path(found["report"]).read_text(encoding="utf-8")
    assert found["report"] == str(Path("trak", "training_report.html")) and "From a shell" in page and "Proof" in page
    assert main([*ask, "--prove_from", "model"]) != 0
    assert "the run's `learning_rate` is not known" in capsys.readouterr().err
    Path("other.json").write_text(json.dumps({**json.loads(Path("args.json").read_text()), "adam_beta2": 0.98}))
    assert main([*ask, "--training_args", "other.json", "--prove_from", "model"]) != 0
    assert "the record of the run has 15 of adam" in capsys.readouterr().err
