"""The documentation: every example runs, and what pages say of messages, commands and tasks is so."""

import ast
import configparser
import re
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset, load_dataset
from doc_examples import (
    documents,
    make_trainer,
    sentences,
    tiny_bert,
    tiny_gpt2,
    trained_trainer,
    word_tokenizer,
    write_reviews,
)
from doc_pages import PAGES, ROOT, RUNNABLE, blocks_of, hf_trak_command, name_of, run_page
from hub_server import TOKEN, Hub, client, hub
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from transformers import BertConfig, BertForMaskedLM, DataCollatorWithPadding, Trainer, TrainingArguments
from vlm_models import conversations, processor_of_words, vlm

from hf_trak import TrakAttributor, TrakConfig
from hf_trak.cli.main import COMMANDS
from hf_trak.modelout_functions import TASK_TO_MODELOUT

__all__ = ["client", "hub"]  # fixtures

FRONT = ("README.md", "docs/index.md")
BLOCKS = [block for page in PAGES for block in blocks_of(page)]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def small(directory: str, **settings: Any) -> TrakConfig:
    return TrakConfig(output_dir=directory, proj_dim=64, use_cpu=True, **settings)


def layouts() -> list[str]:
    """Read the paths that docs/formats.md names, as regular expressions. A directory without named files may have any:
    datasets have files of their own."""
    text = (ROOT / "docs/formats.md").read_text(encoding="utf-8")
    paths = [
        name for line in re.findall(r"^\| (`.+?`) \|", text, re.MULTILINE) for name in re.findall(r"`(.+?)`", line)
    ]
    for block in blocks_of(ROOT / "docs/formats.md"):
        parents: list[str] = []
        for line in block.code.splitlines():
            entry = re.split(r" {2,}", line.strip())[0]
            depth = (len(line) - len(line.lstrip())) // 2
            parents = [*parents[:depth], entry]
            if 'see "' not in line:  # what is described further down
                paths += ["".join([*parents[:-1], name]) for name in entry.split(", ")]
    parents_of_others = {path for path in paths if any(other.startswith(path) and other != path for other in paths)}
    return [pattern(path) for path in paths if path not in parents_of_others]


def pattern(path: str) -> str:
    """Numbers stand for any number of as many digits or more, `<name>` and `…` for anything in one name."""
    escaped = re.sub(r"<[^>]*>|…", "\0", path)
    escaped = re.sub(r"\d+", "\1", re.sub(r"\.hf_trak-tmp.*", "", escaped))
    found = re.escape(escaped).replace("\0", "[^/]+").replace("\1", r"\d+")
    return found + (".+" if path.endswith("/") else "")


def assert_documented(directory: Path, root: str) -> None:
    """Every file below a directory has its place in docs/formats.md, where the directory is called `root`."""
    known = [re.compile(layout) for layout in layouts()]
    files = [path.relative_to(directory).as_posix() for path in sorted(directory.rglob("*")) if path.is_file()]
    assert files
    lost = [file for file in files if not any(k.fullmatch(name) for k in known for name in (file, f"{root}/{file}"))]
    assert not lost


# -- what is run, and what is not ---------------------------------------------------------------------------------


def test_every_page_with_examples_is_run() -> None:
    runnable = {name_of(b.page) for b in BLOCKS if b.language in RUNNABLE and b.reason is None}
    assert runnable == {*RUN_HERE, "README.md"}  # tests/docs/test_readme.py runs the README


def test_blocks_that_are_not_run_say_why() -> None:
    """A block of another language is output, or a layout. A comment without a block before which it stands is lost."""
    assert {block.language for block in BLOCKS} <= {"python", "bash", "text"}
    left_out = [block for block in BLOCKS if block.reason is not None]
    assert all(len(block.reason or "") > 10 for block in left_out)
    assert all(block.language == "bash" for block in left_out), "all Python runs"
    comments = sum(
        len(re.findall(r"^<!-- not run:", page.read_text(encoding="utf-8"), re.MULTILINE)) for page in PAGES
    )
    inside = sum(len(re.findall(r"^<!-- not run:", block.code, re.MULTILINE)) for block in BLOCKS)
    assert comments - inside == len(left_out)
    print("\n".join(f"{block.place}: {block.reason}" for block in left_out))


# -- the pages ----------------------------------------------------------------------------------------------------


def test_the_front_page_has_the_example_of_the_readme() -> None:
    """Which tests/docs/test_readme.py runs; and the same table of figures."""
    texts = [(ROOT / name).read_text(encoding="utf-8") for name in FRONT]
    blocks = [[b for b in blocks_of(ROOT / name) if b.language in ("python", "text")] for name in FRONT]
    assert [b.code for b in blocks[0]] == [b.code for b in blocks[1]] and len(blocks[0]) == 2
    assert len(blocks[0][0].code.splitlines()) <= 25
    tables = [
        re.findall(r"^\| .*\|$", text[text.index("| linear datamodeling score") :], re.MULTILINE) for text in texts
    ]
    assert tables[0][:10] == tables[1][:10]


@pytest.mark.slow
def test_quickstart(place: Path) -> None:
    tokenizer = word_tokenizer()
    namespace = {
        "trainer": trained_trainer(),
        "eval_dataset": sentences(6),
        "model": tiny_bert(),
        "train_dataset": sentences(40),
        "data_collator": DataCollatorWithPadding(tokenizer),
        "tokenizer": tokenizer,
        "new_rows": sentences(4),
    }

    def collected(namespace: dict[str, Any]) -> None:
        steps = [Path(path).name for path in namespace["callback"].checkpoints]
        assert steps == ["checkpoint-100", "checkpoint-200"]

    def asked(namespace: dict[str, Any]) -> None:
        assert len(namespace["every"][0]["trak_scores"]) == 40
        assert (len(namespace["turned"]), len(namespace["together"]), len(namespace["half"])) == (40, 1, 20)
        assert namespace["sources"][0]["trak_groups"] == ["book", "web"]
        assert sorted(namespace["suspects"].tolist()) == list(range(40))

    def revised(namespace: dict[str, Any]) -> None:
        assert len(namespace["revised"].train_dataset) == 42

    checks = {"callback = TrakCallback(": collected, "per=": asked, ".exclude(": revised}
    smaller = {'TrakConfig(output_dir="trak")': 'TrakConfig(output_dir="trak", proj_dim=512)'}
    run_page("docs/quickstart.md", namespace, hf_trak_command, smaller, checks)
    assert (place / "report.html").stat().st_size > 10_000
    assert_documented(place / "trak-3", "trak")


@pytest.mark.slow
def test_which_method(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trainer = make_trainer(sentences(40), 0)
    for module in trainer.model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    given = {"trainer": trainer, "eval_dataset": sentences(6)}
    smaller = {
        'TrakConfig(output_dir="trak", ': 'TrakConfig(output_dir="trak", proj_dim=64, use_cpu=True, ',
        'TrakConfig(output_dir="run")': 'TrakConfig(output_dir="run", proj_dim=64, use_cpu=True)',
    }
    namespace = run_page("docs/which_method.md", given, hf_trak_command, smaller)
    assert {len(namespace[name]) for name in ("quick", "exact", "best", "listed", "refined")} == {6}
    assert namespace["listed"]["trak_stage"][:] == ["exact"] * 6
    assert namespace["refined"]["trak_stage"][:] == ["refined"] * 6
    printed = capsys.readouterr().out
    assert "Fidelity of checkpoints [0], 16 training rows × 4 others as targets" in printed
    assert "% of the rows are not among the first 20" in printed
    assert "Judged by a replay of the run, 6 targets" in printed and "method=Replay(of='run')" in printed
    assert len(list((place / "trak").glob("experiments/*/exact-*/checkpoint-0/refined-*/refined-*.json"))) == 1
    assert_documented(place / "trak", "trak")


@pytest.mark.slow
def test_replay(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = documents(word_tokenizer(), 20).add_column("source", ["book", "web"] * 10)

    def make(rows: Dataset, seed: int) -> Trainer:
        torch.manual_seed(0)
        model = tiny_gpt2()
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
        arguments = TrainingArguments("retraining", max_steps=4, use_cpu=True, report_to="none", save_strategy="no")
        return Trainer(model=model, args=arguments, train_dataset=rows)

    given = {"trainer": make(rows, 0), "make_trainer": make, "eval_dataset": rows.select(range(3))}
    smaller = {'TrakConfig(output_dir="run")': 'TrakConfig(output_dir="run", proj_dim=64, use_cpu=True)'}
    namespace = run_page("docs/replay.md", given, hf_trak_command, smaller)
    assert [len(namespace[name]) for name in ("scored", "helpful", "word", "sources", "recipe")] == [3, 1, 3, 3, 3]
    assert len(namespace["suspects"]) == 20
    assert len(namespace["check"].dropped) == 1
    assert "4 steps over" in capsys.readouterr().out
    assert_documented(place / "run", "trak")


def test_concepts(place: Path) -> None:
    rows = sentences(40)
    run_page(
        "docs/concepts.md",
        {"model": tiny_bert(), "train_dataset": rows, "eval_dataset": rows.select(range(3))},
        hf_trak_command,
    )
    assert len(list((place / "trak").glob("checkpoint-*/train-*"))) == 1, "features do not depend on λ"


@pytest.mark.slow
def test_curvature(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trainer = make_trainer(sentences(40), 0)
    run_page(
        "docs/curvature.md", {"trainer": trainer}, hf_trak_command, {"proj_dim=64, ": "proj_dim=64, use_cpu=True, "}
    )
    printed = capsys.readouterr().out
    assert re.search(r"^bert.encoder.layer.0.attention.self.query.weight +kronecker +8 × 9 ", printed, re.MULTILINE)
    assert_documented(place / "whitened", "trak")


@pytest.mark.slow
def test_viewer(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer = word_tokenizer()
    rows = documents(tokenizer, 12)
    attributor = TrakAttributor(tiny_gpt2(), small("trak"), rows, processing_class=tokenizer).featurize()

    def tokenize(rows: Dataset) -> Dataset:
        return rows.map(lambda row: (ids := tokenizer(row["text"])["input_ids"]) and {"input_ids": ids, "labels": ids})

    given = {"attributor": attributor, "tokenize": tokenize, "eval_dataset": rows.select(range(3))}
    namespace = run_page("docs/viewer.md", given, hf_trak_command)
    assert (place / "report.html").is_file()
    assert len(namespace["answer"].rows) == 12 and namespace["answer"].tokens is not None
    assert capsys.readouterr().out.startswith("[(")


@pytest.mark.slow
def test_tasks(place: Path) -> None:
    rows = sentences(40)
    namespace = {
        "language_model": tiny_gpt2(),
        "documents": documents(word_tokenizer(), 6),
        "model": tiny_bert(),
        "train_dataset": rows,
        "eval_dataset": rows.select(range(3)),
    }
    run_page("docs/tasks.md", namespace, hf_trak_command)
    assert len(namespace["scored"]) == 3
    weighted = namespace["weighted"].featurize().attribute(rows.select(range(3)), top_k=3)
    assert np.isfinite(weighted["trak_scores"][:]).all()


@pytest.mark.slow
def test_language_models(place: Path) -> None:
    tokenizer = word_tokenizer()
    rows = documents(tokenizer, 6)
    pairs = [[rows[i], rows[i + 1]] for i in (0, 2, 4)]
    packed = [
        {"input_ids": [token for row in pair for token in row["input_ids"]],
         "labels": [label for row in pair for label in row["labels"]],
         "seq_lengths": [len(row["input_ids"]) for row in pair]}
        for pair in pairs
    ]  # fmt: skip
    masking = word_tokenizer()
    masking.add_special_tokens({"mask_token": "<mask>"})
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    namespace = {
        "language_model": tiny_gpt2(), "documents": rows, "tokenizer": masking,
        "prompts": rows.select_columns(["input_ids"]).select(range(2)), "packed_rows": Dataset.from_list(packed),
        "masked_language_model": BertForMaskedLM(BertConfig(vocab_size=len(masking), **sizes)).eval(),
        "unmasked_documents": rows.select_columns(["input_ids"]),
    }  # fmt: skip

    def taken_apart(namespace: dict[str, Any]) -> None:
        row = namespace["broken_down"][0]
        assert np.allclose(np.sum(row["trak_token_scores"], axis=1), row["trak_scores"], rtol=1e-3, atol=1e-6)
        assert sum(namespace["named"][0]["target_mask"]) == 1

    run_page("docs/language_models.md", namespace, hf_trak_command, checks={"per_token=": taken_apart})
    assert namespace["masked"].features.store.config["collation"]["draws"] == 8
    assert [found[0] for found in namespace["rows_of_best"]] == [0, 0]


def denoising() -> dict[str, Any]:
    """What the examples of diffusion take for granted."""

    class Unet(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = torch.nn.Conv2d(1, 4, 3, padding=1), torch.nn.Conv2d(4, 1, 3, padding=1)

        def forward(self, sample: Tensor, timestep: Tensor, encoder_hidden_states: Tensor | None = None) -> Any:
            shift = 0 if encoder_hidden_states is None else encoder_hidden_states.mean(dim=(1, 2))[:, None, None, None]
            hidden = self.first(sample) + shift + timestep[:, None, None, None] / 100
            return SimpleNamespace(sample=self.last(torch.nn.functional.silu(hidden)))

    rows = Dataset.from_dict({"pixel_values": torch.randn(6, 1, 4, 4).tolist(), "prompt": [str(i) for i in range(6)]})
    schedule = torch.linspace(0.999, 0.01, 50)
    return {
        "unet": Unet(), "conditional_unet": Unet(), "images": rows, "samples": rows.select([1]), "captioned": rows,
        "noise_scheduler": SimpleNamespace(
            alphas_cumprod=schedule, config=SimpleNamespace(prediction_type="v_prediction")
        ),
        "encode_image": lambda pixels: [[[value[0][0] for value in pixels]]],
        "encode_prompt": lambda text: [[float(text), 1.0]],
    }  # fmt: skip


@pytest.mark.slow
def test_images(place: Path) -> None:
    trl = pytest.importorskip("trl")
    rows, model = conversations(6), vlm("qwen2_vl")
    model.config.pad_token_id = 0
    options = {"max_length": None, "bf16": False, "gradient_checkpointing": False, "report_to": [], "use_cpu": True}
    args = trl.SFTConfig("out", max_steps=1, save_strategy="no", **options)
    trainer = trl.SFTTrainer(model, args=args, train_dataset=rows, processing_class=processor_of_words())
    namespace = {**denoising(), "trainer": trainer, "eval_dataset": rows.select([1])}
    run_page("docs/images.md", namespace, hf_trak_command)
    assert namespace["scored"][0]["trak_indices"][0] == 1
    assert len(namespace["drawn"]) == 1 and len(namespace["scores"]) == 2


@pytest.mark.slow
def test_preferences(place: Path) -> None:
    trl = pytest.importorskip("trl")
    words, options = word_tokenizer(), {"report_to": "none", "use_cpu": True, "bf16": False}
    texts = [f" {word} film fox" for word in ("good", "bad", "dull", "great")]
    pairs = Dataset.from_dict({"prompt": ["the"] * 4, "chosen": texts, "rejected": texts[1:] + texts[:1]})
    given = {"train_dataset": pairs, "processing_class": words}
    model, reference = tiny_gpt2(), tiny_gpt2()
    trainer = trl.DPOTrainer(model, reference, trl.DPOConfig(output_dir="dpo", **options), **given)
    policy_trainer = trl.GRPOTrainer(
        tiny_gpt2(), [lambda completions, **_: [0.0] * len(completions)],
        trl.GRPOConfig(output_dir="grpo", num_generations=2, per_device_train_batch_size=2, **options), **given,
    )  # fmt: skip
    tokens = trainer.train_dataset.map(lambda row: {"ref_chosen_logps": -9.0, "ref_rejected_logps": -9.0})
    namespace = {
        "trainer": trainer, "policy_trainer": policy_trainer, "held_out_pairs": pairs.select([2]),
        "policy": tiny_gpt2(), "token_pairs": tokens,
    }  # fmt: skip
    run_page("docs/preferences.md", namespace, hf_trak_command)
    assert sorted(namespace["scored"][0]["trak_indices"]) == [0, 1, 2, 3] and namespace["best"] != namespace["worst"]
    assert len(namespace["why"][0]["trak_scores"]) == 3
    assert namespace["plain"].features.store.train(0).unwritten() == []
    assert_documented(place / "trak-dpo", "trak")


@pytest.mark.slow
def test_embeddings(place: Path) -> None:
    st = pytest.importorskip("sentence_transformers")
    from sentence_transformers.sentence_transformer import losses, modules
    from sentence_transformers.sentence_transformer.data_collator import SentenceTransformerDataCollator

    words = word_tokenizer()
    tiny_bert().base_model.save_pretrained("encoder")
    words.save_pretrained("encoder")
    tower = modules.Transformer("encoder")
    model = st.SentenceTransformer(modules=[tower, modules.Pooling(8)], device="cpu")
    texts = [f"the {word} film" for word in ("good", "bad", "dull", "great")]
    pairs = Dataset.from_dict({"anchor": texts, "positive": [f"a {text.split()[1]} fox" for text in texts]})
    args = st.SentenceTransformerTrainingArguments("training", use_cpu=True, report_to=[])
    trainer = st.SentenceTransformerTrainer(
        model, args, train_dataset=pairs, loss=losses.MultipleNegativesRankingLoss(model)
    )
    labelled = Dataset.from_dict({"one": texts, "other": texts[::-1], "labels": [0, 1, 1, 0]})
    namespace = {
        "trainer": trainer, "model": model, "pairs": pairs, "pairs_with_labels": labelled, "tokenizer": words,
        "collator": SentenceTransformerDataCollator(model.preprocess), "classifier": tiny_bert(),
    }  # fmt: skip
    run_page("docs/embeddings.md", namespace, hf_trak_command)
    assert len(namespace["scored"][0]["trak_indices"]) == len(namespace["why"][0]["trak_indices"]) == 3
    assert namespace["plain"].featurize().features.store.train(0).unwritten() == []
    assert namespace["reranker"].featurize().features.store.train(0).unwritten() == []
    assert_documented(place / "trak-embeddings", "trak")


def test_projections(place: Path) -> None:
    batch: dict[str, Tensor] = {"input_ids": torch.randint(1, 30, (4, 7)), "attention_mask": torch.ones(4, 7)}
    model = tiny_bert()
    namespace = run_page("docs/projections.md", {"model": model, "batch": batch}, hf_trak_command)
    assert {name: tuple(grad.shape) for name, grad in namespace["grads"].items()} == {
        name: (4, *parameter.shape) for name, parameter in model.named_parameters()
    }
    features, by_hand = namespace["features"].double().numpy(), namespace["by_hand"]
    # Signs times float32 numbers are exact; 50 of them are added, each time with an error of 2⁻²⁴ of the sum so far.
    bound = 50 * 2.0**-24 * abs(namespace["gradients"].double()).sum(dim=1).numpy()[:, None]
    assert (abs(features - by_hand) <= bound).all()


@pytest.mark.slow
def test_hub(hub: Hub, client: Path, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    model = tiny_bert().eval()
    model.save_pretrained("model")
    hub.put("model", "me/my-model", {path.name: path.read_bytes() for path in Path("model").iterdir()}, private=True)
    namespace = {
        "attributor": TrakAttributor(model, small("trak"), sentences(40)).featurize(),
        "my_examples": sentences(5),
        "train_dataset": sentences(40),
    }
    run_page("docs/hub.md", namespace, hf_trak_command)
    assert len(namespace["scored"]) == len(namespace["again"]) == 5
    assert len(namespace["scored"][0]["trak_indices"]) == 10
    assert namespace["shown"][0]["trak_rows"][0]["text"].startswith("sentence ")
    assert len(load_dataset("me/my-scores", split="train")) == 5


@pytest.mark.slow
def test_command_line(
    hub: Hub, client: Path, place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    write_reviews(place)
    hub.put("model", "me/model", {p.name: p.read_bytes() for p in Path("model").iterdir()}, private=True)
    rng = np.random.default_rng(0)
    np.save("masks.npy", rng.random((12, 40)) < 0.5)
    np.save("outputs.npy", rng.standard_normal((12, 4)))
    done = []

    def command(argv: list[str]) -> None:
        monkeypatch.chdir(elsewhere if {"--index", "pull"} & set(argv) else place)
        hf_trak_command(argv)
        done.append(argv[1])

    elsewhere = place / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "mine.jsonl").write_bytes((place / "mine.jsonl").read_bytes())
    run_page("docs/command_line.md", {}, command)
    assert set(COMMANDS) - set(done) == {"selftest", "serve"}
    assert (place / "trak/scores/mine/report.html").is_file()
    assert (elsewhere / "copy/trak_index.json").is_file()
    assert_documented(place / "trak", "trak")
    assert_documented(elsewhere / "copy", "trak")
    assert re.search(r"^lds +-?0\.\d+", capsys.readouterr().out, re.MULTILINE)


@pytest.mark.slow
def test_evaluation(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = sentences(12)
    attributor = TrakAttributor(tiny_bert(), small("trak"), rows).featurize()
    namespace = {
        "make_trainer": make_trainer,
        "train_dataset": rows,
        "targets": sentences(4),
        "attributor": attributor,
    }

    def verified(namespace: dict[str, Any]) -> None:
        assert "16 draws" in capsys.readouterr().out

    def measured(namespace: dict[str, Any]) -> None:
        assert namespace["scores"].shape == (12, 4)
        assert namespace["retrained"].num_rows == 8
        assert re.search(r"-?\d\.\d+ \[-?\d\.\d+, -?\d\.\d+\]", capsys.readouterr().out)

    # A hundred retrainings take most of a minute.
    run_page(
        "docs/evaluation.md",
        namespace,
        hf_trak_command,
        replace={", 100)": ", 8)"},
        checks={"attributor.verify(": verified, "TrainerRetraining(make_trainer, train_dataset, targets)": measured},
    )
    assert_documented(place / "lds", "lds")
    assert_documented(place / "bank", "bank")


@pytest.mark.slow
def test_scaling(place: Path) -> None:
    pytest.importorskip("faiss")
    write_reviews(place)
    model, rows = tiny_bert(), sentences(40)
    config = TrakConfig(output_dir="trak", proj_dim=4096, feature_dtype="int2", shard_size=5, use_cpu=True)
    attributor = TrakAttributor(model, config, rows)
    namespace = {
        "model": model, "attributor": attributor, "path": model.state_dict(), "index": 0, "quarter": 2,
        "eval_dataset": rows.select(range(3)), "train_dataset": rows,
    }  # fmt: skip

    def other_jobs(namespace: dict[str, Any]) -> None:
        assert len(list((place / "trak/checkpoint-0").glob("train-*"))) == 2
        for quarter in (0, 1, 3):
            attributor.featurize({0: namespace["path"]}, part=(quarter, 4))

    def same_rows(namespace: dict[str, Any]) -> None:
        expected = attributor.attribute(namespace["eval_dataset"], top_k=20, method="index")["trak_indices"][:]
        assert namespace["best"].column("row_id").to_numpy().reshape(3, 20).tolist() == expected

    checks = {"part=(quarter, 4)": other_jobs, "score_batch": same_rows}
    run_page("docs/scaling.md", namespace, hf_trak_command, checks=checks)
    assert_documented(place / "trak", "trak")


@pytest.mark.slow
def test_trak_script(place: Path) -> None:
    from sklearn.datasets import load_digits

    data = load_digits()
    images, labels = torch.tensor(data.images / 16.0, dtype=torch.float32), torch.tensor(data.target)

    def network() -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))

    train_set = TensorDataset(images[:1100], labels[:1100])
    test_set = TensorDataset(images[1100:1120], labels[1100:1120])
    namespace = {
        "model": network(),
        "checkpoints": [network().state_dict() for _ in range(2)],
        "train_set": train_set,
        "test_set": test_set,
        "train_loader": DataLoader(train_set, batch_size=100),
        "test_loader": DataLoader(test_set, batch_size=8),
    }
    run_page("docs/api.md", namespace, hf_trak_command)
    assert namespace["scores"].shape == (1100, 20)
    assert namespace["scores"].isfinite().all()
    own = TrakAttributor(namespace["model"], small("trak"), train_set, task="image_classification")
    assert len(own.featurize(namespace["checkpoints"]).attribute(test_set, top_k=10)) == 20
    for directory, root in (("trak_results", "trak_results"), ("trak", "trak")):
        assert_documented(place / directory, root)


def test_contributing(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = sentences(20)
    graded = Dataset.from_dict({"input_ids": rows["input_ids"][:], "labels": [float(i % 4) for i in range(20)]})
    namespace = run_page("docs/contributing.md", {"grader": tiny_bert(1), "graded_rows": graded}, hf_trak_command)
    assert len(namespace["used"]) > 0
    printed = capsys.readouterr().out
    assert "rows 0 to 19: scores (20, 2), the highest 1.00" in printed
    assert "\nintact\n" in printed and "state='damaged'" in printed


RUN_HERE = {
    "docs/index.md",  # the example of the README
    "docs/quickstart.md",
    "docs/which_method.md",
    "docs/concepts.md",
    "docs/tasks.md",
    "docs/language_models.md",
    "docs/images.md",
    "docs/embeddings.md",
    "docs/preferences.md",
    "docs/viewer.md",
    "docs/hub.md",
    "docs/evaluation.md",
    "docs/scaling.md",
    "docs/sharded.md",  # by several processes, in test_sharded.py
    "docs/api.md",
    "docs/replay.md",
    "docs/command_line.md",
    "docs/curvature.md",
    "docs/projections.md",
    "docs/contributing.md",
}


# -- what pages say -----------------------------------------------------------------------------------------------


@cache
def texts_of_the_library() -> str:
    """All texts in the library's code, f-strings with `…` for values, one per line."""
    found = []
    for path in sorted((ROOT / "hf_trak").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(" ".join(node.value.split()))
            elif isinstance(node, ast.JoinedStr):
                parts = (part.value if isinstance(part, ast.Constant) else "…" for part in node.values)
                found.append(" ".join("".join(map(str, parts)).split()))
    return "\n".join(found)


def test_quoted_messages_are_those_of_the_library() -> None:
    """A message that was reworded is to be found here, too."""
    page = (ROOT / "docs/troubleshooting.md").read_text(encoding="utf-8")
    quoted = re.findall(r"^> (.+)$", page, re.MULTILINE)
    assert len(quoted) > 20
    texts = texts_of_the_library()
    lost = []
    for message in quoted:
        parts = [part.strip(" .") for part in message.split("…")]
        lost += [(message, part) for part in parts if len(part) > 1 and part not in texts]
    assert not lost


def test_the_table_of_tasks_is_complete() -> None:
    table = (ROOT / "docs/tasks.md").read_text(encoding="utf-8").split("## ")[0]
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `") or line.startswith("| a f")]
    assert set(re.findall(r"`([a-z0-9_]+)`", " ".join(rows))) == set(TASK_TO_MODELOUT)


def test_the_table_of_commands_is_complete() -> None:
    page = (ROOT / "docs/command_line.md").read_text(encoding="utf-8")
    rows = [line.split("|")[1] for line in page.splitlines() if line.startswith("| `")]
    assert set(re.findall(r"`([a-z-]+)`", " ".join(rows))) == set(COMMANDS)


def test_the_table_of_layers_is_that_of_the_linter() -> None:
    rules = configparser.ConfigParser()
    rules.read(ROOT / ".importlinter")
    lines = rules["importlinter:contract:layers"]["layers"].strip().splitlines()
    layers = [set(re.findall(r"\w+", line)) for line in reversed(lines)]
    page = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    table: list[set[str]] = [set() for _ in layers]
    for number, names in re.findall(r"^\| (\d+) \| (.+?) \|", page, re.MULTILINE):
        table[int(number) - 1] |= set(re.findall(r"`hf_trak/(\w+?)(?:\.py|/)`", names))
    assert table == layers


def test_the_pages_are_few() -> None:
    pages = sorted((ROOT / "docs").rglob("*.md"))
    words = sum(len(page.read_text(encoding="utf-8").split()) for page in pages)
    assert len(pages) <= 25 and words <= 25_000, (len(pages), words)


def test_the_environment_variables_are_documented() -> None:
    named = set(re.findall(r"HF_TRAK_[A-Z0-9_]*[A-Z0-9]", texts_of_the_library()))
    pages = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
    assert named and all(name in pages for name in named), named
