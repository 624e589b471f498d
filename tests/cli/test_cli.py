"""The command line: every command on a tiny model and datasets saved to disk, as a user would have them."""

import json
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import ClassLabel, Dataset, DatasetDict, Features, Image, Value, load_from_disk
from hub_server import TOKEN, client, hub
from PIL import Image as PILImage
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BertTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedTokenizerFast,
    ViTConfig,
    ViTForImageClassification,
    ViTImageProcessor,
)

from hf_trak import TrakAttributor, TrakConfig
from hf_trak.cli.main import COMMANDS, main
from hf_trak.evaluation import linear_datamodeling_score
from hf_trak.hub import scores as published
from hf_trak.report.run import AttributionRun
from hf_trak.store.sealed import write_sealed

__all__ = ["client", "hub"]  # fixtures

ROOT = Path(__file__).parents[2]
WORDS = ["good", "bad", "film", "plot", "actor", "great", "dull", "the", "a", "was", "is", "not", "very", "and", "but"]
N_TRAIN, N_EVAL = 40, 5


def sentences(n: int, seed: int) -> Dataset:
    rng = np.random.default_rng(seed)
    texts = [" ".join(rng.choice(WORDS, size=rng.integers(3, 9))) for _ in range(n)]
    features = Features({"sentence": Value("string"), "label": ClassLabel(names=["negative", "positive"])})
    return Dataset.from_dict({"sentence": texts, "label": [int("good" in t or "great" in t) for t in texts]}, features)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a text classifier and its tokenizer in `model`, its rows in `data`, and `run.yaml`."""
    home = tmp_path_factory.mktemp("home")
    (home / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]))
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=20, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8,
        max_position_embeddings=32, num_labels=2,
    )  # fmt: skip
    BertForSequenceClassification(config).save_pretrained(home / "model")
    BertTokenizer(vocab=str(home / "vocab.txt"), model_max_length=32).save_pretrained(home / "model")
    DatasetDict({"train": sentences(N_TRAIN, 0), "test": sentences(N_EVAL, 1)}).save_to_disk(home / "data")
    (home / "run.yaml").write_text(
        f"model_name_or_path: {home}/model\ndataset_name: {home}/data\noutput_dir: {home}/trak\n"
        "proj_dim: 64\nshard_size: 16\nuse_cpu: true\n"
    )
    return home


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], env=environment(), capture_output=True, text=True)


@pytest.fixture
def answer(capsys: pytest.CaptureFixture[str]):
    """Run a command in this process with `--json`; the object that it prints."""

    def ask(*argv: str, status: int = 0) -> dict[str, Any]:
        assert main([*argv, "--json"]) == status, capsys.readouterr().err
        return json.loads(capsys.readouterr().out)

    return ask


@pytest.fixture(scope="module")
def featurized(home: Path) -> Path:
    """The output directory of a run that was featurized by the command line."""
    assert main(["featurize", "--config", str(home / "run.yaml")]) == 0
    return home / "trak"


@pytest.fixture
def featurized_by_two(home: Path, tmp_path: Path) -> Path:
    """The output directory of two processes that featurized through the module, as `accelerate launch` starts it."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "-m", "hf_trak"]
    result = python(
        *launcher, "featurize", "--config", str(home / "run.yaml"), "--json", "--output_dir", str(tmp_path / "trak")
    )
    assert result.returncode == 0, result.stderr[-3000:]
    printed = json.loads(result.stdout)
    assert (printed["train_rows"], printed["features"], printed["missing_shards"]) == (N_TRAIN, 64, 0)
    return tmp_path / "trak"


# -- the program itself ----------------------------------------------------------------------------------------------


def test_help_takes_less_than_half_a_second_of_cpu_time():
    """Measured in CPU time of the child, which does not depend on other processes."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    result = python("-m", "hf_trak", "--help")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 0.5
    assert all(f"  {name} " in result.stdout for name in COMMANDS)
    assert len(result.stdout.splitlines()) < 25
    code = "import sys; from hf_trak.cli.main import main; main(['--help']); assert 'torch' not in sys.modules"
    assert python("-c", code).returncode == 0


def test_the_installed_program_is_this_main():
    text = (ROOT / "pyproject.toml").read_text()
    assert 'hf-trak = "hf_trak.cli.main:main"' in text


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help_and_takes_a_config_file(name, capsys):
    with pytest.raises(SystemExit) as caught:
        main([name, "--help"])
    assert caught.value.code == 0
    text = capsys.readouterr().out
    assert f"hf-trak {name}" in text and "--config FILE" in text and "--json" in text
    assert len(text.splitlines()) < 80
    with pytest.raises(SystemExit):
        main([name, "--help", "all"])
    assert len(text.splitlines()) <= len(capsys.readouterr().out.splitlines()) < 240


def test_unknown_commands_options_and_keys(capsys, tmp_path):
    assert main(["featurise"]) == 2
    assert "did you mean featurize?" in capsys.readouterr().err
    assert main([]) == 2
    with pytest.raises(SystemExit) as caught:
        main(["featurize", "--proj_dimm", "3"])
    assert caught.value.code == 2
    assert "did you mean --proj_dim" in capsys.readouterr().err
    (tmp_path / "c.yaml").write_text("proj_dimm: 3\n")
    assert main(["featurize", "--config", str(tmp_path / "c.yaml")]) == 1
    assert "'proj_dimm', which no argument is called" in capsys.readouterr().err
    assert main(["--version"]) == 0


def test_errors_are_messages_and_tracebacks_on_request(capsys, tmp_path, monkeypatch):
    assert main(["report", str(tmp_path)]) == 1
    error = capsys.readouterr().err
    assert "hf-trak report: error: IncompleteStoreError" in error and "Traceback" not in error
    monkeypatch.setenv("HF_TRAK_TRACEBACK", "1")
    with pytest.raises(RuntimeError, match="holds no run"):
        main(["report", str(tmp_path)])


@pytest.mark.slow
@pytest.mark.parametrize("argument", ["env", "--help"])
def test_output_that_nobody_reads_is_no_error(argument):
    """As of `hf-trak env | head -1`, whose reader is gone before the output is."""
    code = f"import os, sys; from hf_trak.cli.main import main; os.read(0, 1); sys.exit(main([{argument!r}]))"
    reader, writer = os.pipe()
    child = subprocess.Popen(
        [sys.executable, "-c", code], env=environment(), stdin=subprocess.PIPE, stdout=writer, stderr=subprocess.PIPE
    )
    os.close(writer)
    os.close(reader)
    _, error = child.communicate(b"x")
    assert child.returncode == 1 and error == b""


def test_env_names_versions_and_no_token(answer, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secretsecret")
    printed = answer("env")
    assert printed["torch"] == torch.__version__.split("+")[0] or printed["torch"] == torch.__version__
    assert {"hf_trak", "python", "transformers", "gpus"} <= set(printed)
    assert "secret" not in json.dumps(printed)


@pytest.mark.slow
def test_selftest_passes_here_and_notices_what_is_wrong(answer, monkeypatch):
    printed = answer("selftest")
    assert printed["passed"]
    names = {check["name"] for check in printed["checks"] if check["passed"]}
    assert {"engine hooked", "engine iterative", "projection sjlt", "features to scores"} <= names
    monkeypatch.setattr("hf_trak.cli.selftest._ENGINES", ())
    monkeypatch.setattr("hf_trak.cli.selftest.matrix", lambda *_: np.zeros((300, 64)))
    printed = answer("selftest", status=1)
    failed = {check["name"] for check in printed["checks"] if check["passed"] is False}
    assert failed == {"projection sjlt", "projection rademacher", "projection normal"}


# -- from a model and rows to a report -------------------------------------------------------------------------------


def check_scores(featurized, home, directory):
    """Compare the scores of the command line with those of the library."""
    model = BertForSequenceClassification.from_pretrained(home / "model")
    tokenizer = BertTokenizer.from_pretrained(home / "model")
    train, targets = (sentences(*rows).rename_column("label", "labels") for rows in ((N_TRAIN, 0), (N_EVAL, 1)))
    train, targets = (data.map(lambda row: tokenizer(row["sentence"])) for data in (train, targets))
    config = TrakConfig(output_dir=str(directory), proj_dim=64, shard_size=16, use_cpu=True, budget="fast")
    attributor = TrakAttributor(model, config, train, processing_class=tokenizer).featurize()
    expected = attributor.attribute(targets, top_k=4)
    asked = ["--top_k", "4", "--name", "same", "--method", "index"]
    assert main(["attribute", "--output_dir", str(featurized), *asked]) == 0
    found = load_from_disk(featurized / "scores" / "same" / "run" / "scored")
    assert found["trak_indices"][:] == expected["trak_indices"][:]
    np.testing.assert_allclose(found["trak_scores"][:], expected["trak_scores"][:], rtol=1e-4)


@pytest.mark.slow
def test_featurize_gives_what_the_library_gives(featurized, home, tmp_path):
    check_scores(featurized, home, tmp_path / "library")


@pytest.mark.slow
def test_featurize_by_two_processes_gives_what_the_library_gives(featurized_by_two, home, tmp_path):
    check_scores(featurized_by_two, home, tmp_path / "library")


@pytest.mark.slow
def test_attribute_report_inspect(featurized, home, answer, tmp_path):
    printed = answer("attribute", "--output_dir", str(featurized), "--name", "all", "--all_scores")
    assert printed == {"run": f"{featurized}/scores/all", "targets": N_EVAL, "train_rows": N_TRAIN}
    report = answer("report", printed["run"], "--output", str(tmp_path / "r.html"), "--examples", "3")
    page = Path(report["report"]).read_text()
    assert len(page.encode()) == report["bytes"]
    assert page.count("<article") == N_EVAL and "Training set</a>" in page
    for sentence in sentences(N_EVAL, 1)["sentence"]:
        assert sentence in page
    assert "<bdi>positive</bdi>" in page or "<bdi>negative</bdi>" in page

    # The linear datamodeling score of these scores against made-up retrainings.
    (file,) = Path(featurized, "scores", "all").glob("per-target-*.arrow")
    scores = Dataset.from_file(str(file)).with_format("numpy")["trak_scores"][:].T
    content = file.read_bytes()
    file.write_bytes(content[:-9] + bytes([content[-9] ^ 1]) + content[-8:])
    found = answer("inspect", printed["run"], "--check", status=1)
    assert [one["path"] for one in found["files"] if one["state"] == "damaged"] == [str(file)]
    file.write_bytes(content)
    assert answer("inspect", printed["run"], "--check")["counts"].get("damaged", 0) == 0
    kept = AttributionRun.load(printed["run"]).scored
    assert published.check_scores(kept)["trak_scores"] == min(50, N_TRAIN)
    rng = np.random.default_rng(0)
    masks, outputs = rng.random((9, N_TRAIN)) < 0.5, rng.normal(size=(9, N_EVAL))
    np.save(tmp_path / "masks.npy", masks)
    np.save(tmp_path / "outputs.npy", outputs)
    files = ["--masks", str(tmp_path / "masks.npy"), "--outputs", str(tmp_path / "outputs.npy")]
    expected = linear_datamodeling_score(scores, masks, outputs)
    found = answer("evaluate", printed["run"], *files)
    assert found["lds"] == pytest.approx(float(expected.mean()))
    np.save(tmp_path / "scores.npy", scores)
    assert answer("evaluate", str(tmp_path / "scores.npy"), *files) == found

    store = answer("inspect", str(featurized))
    assert store["intact"] and store["complete"] and "all" in store["runs"]
    assert store["config"]["train_size"] == N_TRAIN
    assert store["checkpoints"][0]["shards"] == 3


@pytest.mark.slow
def test_recommend_prints_commands(featurized, answer, capsys):
    found = answer("recommend", "--output_dir", str(featurized))
    assert [one["budget"] for one in found["rows"]] == ["fast", "balanced", "best"]
    assert main(["recommend", "--output_dir", str(featurized)]) == 0
    printed = capsys.readouterr().out
    command = f"    hf-trak attribute --output_dir {featurized} --eval_dataset ROWS --budget fast  # Index()"
    assert command in printed.splitlines()
    assert "attribute(eval_dataset" not in printed


@pytest.mark.slow
def test_estimate_foretells_what_featurize_writes(featurized, home, answer, capsys):
    config = ["--config", str(home / "run.yaml")]
    printed = answer("estimate", *config)
    written = sum(path.stat().st_size for path in (featurized / "checkpoint-0").iterdir())
    promised = {name: stage["disk"] for name, stage in printed["stages"].items()}
    assert promised["features"] + promised["solver"] == pytest.approx(written, rel=0.1)
    assert (printed["train_size"], printed["seconds"]) == (N_TRAIN, None)
    assert answer("estimate", *config, "--measure")["seconds"] > 0
    bound = answer("estimate", *config, "--device", "h200")
    assert bound["seconds"] > 0 and bound["roofline"]["launches"] > 0
    model = ["--model", str(home / "model"), "--train_size", "1000000", "--proj_dim", "8192"]
    assert (
        answer("estimate", *model, "--feature_dtype", "float32")["stages"]["features"]["disk"] > 1_000_000 * 8192 * 4
    )
    assert answer("estimate", *model)["stages"]["features"]["disk"] < 1_000_000 * 8192 * 0.51
    assert main(["estimate", "--model", str(home / "model")]) == 1
    assert "--train_size" in capsys.readouterr().err


@pytest.mark.slow
def test_the_mean_of_all_targets(featurized, answer):
    common = ["--output_dir", str(featurized), "--top_k", str(N_TRAIN)]
    each = load_from_disk(answer("attribute", *common, "--name", "each")["run"] + "/run/scored")
    run = answer("attribute", *common, "--name", "together", "--group_by", "all")["run"]
    (mean,) = load_from_disk(run + "/run/scored")
    assert mean["n_targets"] == N_EVAL
    expected = np.zeros(N_TRAIN)
    for row in each:
        expected[row["trak_indices"]] += np.array(row["trak_scores"]) / N_EVAL
    found = np.zeros(N_TRAIN)
    found[mean["trak_indices"]] = mean["trak_scores"]
    assert np.allclose(found, expected, rtol=1e-4, atol=1e-5 * np.abs(expected).max())
    assert Path(answer("report", run)["report"]).is_file()


def test_inspect_finds_what_is_missing_and_what_is_damaged(featurized, answer, capsys, tmp_path):
    import shutil

    copy = tmp_path / "trak"
    shutil.copytree(featurized, copy)
    shards = sorted((copy / "checkpoint-0").glob("train-*.safetensors"))
    shards[1].unlink()
    (copy / "checkpoint-0" / "gram.safetensors").unlink()
    found = answer("inspect", str(copy))
    assert found["intact"] and not found["complete"]
    assert found["checkpoints"][0]["missing_shards"] == [1]
    content = bytearray(shards[0].read_bytes())
    content[-3] ^= 1  # one bit of one value
    shards[0].write_bytes(content)
    found = answer("inspect", str(copy), "--check", status=1)
    damaged = [one["path"] for one in found["files"] if one["state"] == "damaged"]
    assert damaged == [str(shards[0])] and found["counts"]["damaged"] == 1
    assert answer("inspect", str(copy))["intact"]  # without reading values
    shards[2].write_bytes(content[:100])
    assert main(["inspect", str(copy)]) == 1
    assert "DAMAGED" in capsys.readouterr().out


def test_other_settings_for_the_same_directory_are_refused(featurized, home, capsys):
    record = (featurized / "featurize.json").read_bytes()
    assert main(["featurize", "--config", str(home / "run.yaml"), "--seed", "5"]) == 1
    assert "seed: saved 0, given 5" in capsys.readouterr().err
    assert (featurized / "featurize.json").read_bytes() == record


def test_what_is_missing_is_named(home, capsys, tmp_path):
    assert main(["featurize", "--output_dir", str(tmp_path), "--model", str(home / "model")]) == 1
    assert "--train_dataset missing" in capsys.readouterr().err
    rows = ["--model", str(home / "model"), "--output_dir", str(tmp_path), "--use_cpu", "--train_dataset"]
    assert main(["featurize", *rows, str(home / "data"), "--train_split", "dev"]) == 1
    assert "has the splits ['train', 'test'], not 'dev'" in capsys.readouterr().err
    assert main(["featurize", *rows, str(home / "data"), "--label_column", "stars"]) == 1
    assert "`label_column` names ['stars']" in capsys.readouterr().err
    bare = load_from_disk(str(home / "data"))["test"].remove_columns("label")
    bare.to_parquet(tmp_path / "bare.parquet")
    assert main(["featurize", *rows, str(tmp_path / "bare.parquet")]) == 1
    assert "There is no column of ['labels', 'label'] among ['sentence']" in capsys.readouterr().err
    ready = Dataset.from_dict({"input_ids": [[1, 2, 3]] * 4})
    ready.to_parquet(tmp_path / "ready.parquet")
    assert main(["featurize", *rows, str(tmp_path / "ready.parquet")]) == 1
    assert (
        "no labels for the task 'text_classification'. Expected one of ['labels', 'label']" in capsys.readouterr().err
    )
    (tmp_path / "rows.xyz").write_text("x")
    assert main(["featurize", *rows, str(tmp_path / "rows.xyz")]) == 1
    assert "ends in '.xyz'" in capsys.readouterr().err


def test_targets_lack_a_column_of_the_training_rows(featurized, home, capsys, tmp_path):
    for missing in ("label", "sentence"):
        rows = load_from_disk(str(home / "data"))["test"].remove_columns(missing)
        rows.to_parquet(tmp_path / "targets.parquet")
        targets = ["--output_dir", str(featurized), "--eval_dataset", str(tmp_path / "targets.parquet")]
        assert main(["attribute", *targets]) == 1
        assert f"and not ['{missing}'], which the training rows have" in capsys.readouterr().err


@pytest.mark.slow
def test_data_files_string_labels_and_checkpoints(home, answer, tmp_path):
    rows = sentences(12, 3)
    names = ["LABEL_0", "LABEL_1"]
    lines = [json.dumps({"text": r["sentence"], "label": names[r["label"]]}) for r in rows]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    for name in ("a", "b"):
        torch.manual_seed(ord(name))
        config = BertConfig.from_pretrained(home / "model")
        BertForSequenceClassification(config).save_pretrained(tmp_path / name)
    common = ["--use_cpu", "--output_dir", str(tmp_path / "trak"), "--proj_dim", "32"]
    data = ["--train_dataset", str(tmp_path / "rows.jsonl"), "--max_train_samples", "10"]
    weights = ["--checkpoints", str(tmp_path / "a"), str(tmp_path / "b")]
    printed = answer("featurize", "--model", str(home / "model"), *data, *weights, *common)
    assert (printed["train_rows"], printed["checkpoints"]) == (10, 2)
    targets = ["--eval_dataset", str(tmp_path / "rows.jsonl"), "--max_eval_samples", "2", "--top_k", "3"]
    run = answer("attribute", "--output_dir", str(tmp_path / "trak"), *targets)["run"]
    facts = json.loads((Path(run) / "run" / "run.json").read_text())["facts"]
    assert facts["checkpoints"] == ["a", "b"] and facts["task"] is not None
    assert load_from_disk(f"{run}/run/scored").features["labels"].names == names


# -- the Hub ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_push_pull_and_attribute_without_the_training_rows(
    featurized, home, answer, hub, client, tmp_path, monkeypatch, capsys
):
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    asked = ["--top_k", "3", "--method", "index"]
    expected = answer("attribute", "--output_dir", str(featurized), "--name", "published", *asked)
    weights = {path.name: path.read_bytes() for path in (home / "model").iterdir()}
    hub.put("model", "me/model", weights)
    pushed = answer(
        "push", str(featurized), "--repo_id", "me/index", "--model_name", "me/model",
        "--scores", expected["run"],
    )  # fmt: skip
    assert {"README.md", "trak_config.json"} <= set(hub.dataset("me/index"))
    assert pushed["repo_id"] == "me/index" and pushed["commit"] and hub.repos["dataset", "me/index"].private
    pulled = answer("pull", "me/index", "--output_dir", str(tmp_path / "copy"))
    assert pulled["checkpoints"] == [0]
    assert answer("inspect", str(tmp_path / "copy"))["complete"]
    (tmp_path / "mine.jsonl").write_text("\n".join(json.dumps(row) for row in sentences(N_EVAL, 1)))
    targets = ["--eval_dataset", str(tmp_path / "mine.jsonl"), "--output_dir", str(tmp_path / "work"), "--use_cpu"]
    found = answer("attribute", "--index", "me/index", *targets, *asked)
    beside = answer("attribute", "--index", "me/index", *targets[:2], "--output_dir", str(featurized), "--use_cpu",
                    *asked, "--name", "beside")  # fmt: skip
    assert (
        load_from_disk(f"{beside['run']}/run/scored")["trak_indices"][:]
        == (load_from_disk(f"{found['run']}/run/scored")["trak_indices"][:])
    )
    assert main(["attribute", "--index", "me/index", *targets, "--proj_dim", "99"]) != 0
    assert "['proj_dim'] cannot be chosen for an index that exists" in capsys.readouterr().err
    ours, theirs = (load_from_disk(f"{run['run']}/run/scored") for run in (found, expected))
    assert ours["trak_indices"][:] == theirs["trak_indices"][:]
    np.testing.assert_allclose(ours["trak_scores"][:], theirs["trak_scores"][:], rtol=1e-5)
    page = Path(answer("report", found["run"])["report"]).read_text()
    assert page.count("<article") == N_EVAL and f"row {ours[0]['trak_indices'][0]}<" in page
    for path in tmp_path.rglob("*"):
        assert not path.is_file() or TOKEN.encode() not in path.read_bytes()


# -- other kinds of rows ---------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_images(answer, tmp_path):
    rng = np.random.default_rng(0)
    config = ViTConfig(
        image_size=16, patch_size=8, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8,
        num_labels=2,
    )  # fmt: skip
    ViTForImageClassification(config).save_pretrained(tmp_path / "model")
    ViTImageProcessor(size={"height": 16, "width": 16}).save_pretrained(tmp_path / "model")
    pictures = [PILImage.fromarray(rng.integers(0, 255, (16, 16, 3), dtype=np.uint8)) for _ in range(14)]
    features = Features({"image": Image(), "label": ClassLabel(names=["cat", "dog"])})
    rows = Dataset.from_dict({"image": pictures, "label": [0, 1] * 7}, features=features)
    DatasetDict({"train": rows.select(range(12)), "validation": rows.select([12, 13])}).save_to_disk(tmp_path / "data")
    common = ["--use_cpu", "--output_dir", str(tmp_path / "trak"), "--proj_dim", "32"]
    answer("featurize", "--model", str(tmp_path / "model"), "--train_dataset", str(tmp_path / "data"), *common)
    run = answer("attribute", "--output_dir", str(tmp_path / "trak"), "--top_k", "2")["run"]
    page = Path(answer("report", run)["report"]).read_text()
    assert page.count('aria-label="Target ') == 2
    assert "data:image/png;base64," in page and "<bdi>cat</bdi>" in page
    # Another way from images to pixels is another set of features.
    ViTImageProcessor(size={"height": 16, "width": 16}, image_mean=[0.1] * 3).save_pretrained(tmp_path / "model")
    assert main(["attribute", "--output_dir", str(tmp_path / "trak"), "--name", "again"]) == 1


@pytest.mark.slow
def test_a_language_model(home, answer, tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = Tokenizer(
        models.WordLevel({"<eos>": 0, **{word: i + 1 for i, word in enumerate(WORDS)}}, unk_token="<eos>")
    )
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<eos>").save_pretrained(tmp_path / "model")
    config = GPT2Config(vocab_size=16, n_embd=8, n_layer=1, n_head=2, n_positions=16, bos_token_id=0, eos_token_id=0)
    GPT2LMHeadModel(config).save_pretrained(tmp_path / "model")
    (tmp_path / "train.txt").write_text("\n".join(sentences(12, 5)["sentence"]))
    (tmp_path / "eval.txt").write_text("the film was good\nthe plot was dull")
    common = ["--use_cpu", "--output_dir", str(tmp_path / "trak"), "--proj_dim", "32"]
    data = ["--train_dataset", str(tmp_path / "train.txt")]
    answer("featurize", "--model", str(tmp_path / "model"), *data, *common)
    targets = ["--eval_dataset", str(tmp_path / "eval.txt")]
    run = answer("attribute", "--output_dir", str(tmp_path / "trak"), *targets, "--top_k", "2")["run"]
    assert "the film was good" in Path(answer("report", run)["report"]).read_text()


@pytest.mark.parametrize("name", ["nowhere.jsonl", "./nowhere", "/nowhere/rows"])
def test_a_file_that_is_not_there_is_no_repo(name, home, capsys):
    (home / "holds").mkdir(exist_ok=True)
    write_sealed(home / "holds" / "featurize.json", {"arguments": {}, "trak": {}})
    assert main(["attribute", "--output_dir", str(home / "holds"), "--eval_dataset", name]) == 1
    assert f"There is no such file or directory: {name!r}" in capsys.readouterr().err


def test_a_model_that_is_not_there_is_named(home, capsys, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    arguments = ["--train_dataset", str(home / "data"), "--output_dir", str(home / "absent")]
    assert main(["featurize", "--model", "nomodel", *arguments]) == 1
    error = capsys.readouterr().err
    assert "HubAccessError: The model 'nomodel' at revision 'main' could not be loaded" in error
    assert "HF_HUB_OFFLINE is set" in error
    assert main(["featurize", "--model", "./nomodel", *arguments]) == 1
    assert "There is no such file or directory: './nomodel'" in capsys.readouterr().err


def test_a_directory_without_a_run_is_named_before_rows_are_loaded(tmp_path, capsys):
    nowhere = tmp_path / "nowhere"
    assert main(["attribute", "--output_dir", str(nowhere), "--eval_dataset", "absent.jsonl"]) == 1
    error = capsys.readouterr().err
    assert f"'{nowhere}' holds no run: featurize.json is missing" in error
    assert "--model and --train_dataset" in error and "--index" in error


def test_missing_arguments_have_the_names_of_the_readme(capsys, tmp_path):
    assert main(["featurize", "--output_dir", str(tmp_path)]) == 1
    assert "--model and --train_dataset missing" in capsys.readouterr().err
    assert main(["estimate"]) == 1
    assert "--model, and --train_dataset or --train_size" in capsys.readouterr().err
