"""Exact scores do not depend on how they are computed: batches, padding, slices, order of rows, processes, kills."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import store_jobs
import torch
from datasets import Dataset
from store_jobs import Job, start_group
from torch import Tensor, nn
from trak_options import trak_config
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
)

from hf_trak import TrakAttributor, TrakConfig
from hf_trak.curvature import curvature as plan
from hf_trak.gradient_computers.hooked.workspace import BLOCK_BYTES_VARIABLE
from hf_trak.store import atomic, lease

pytestmark = pytest.mark.usefixtures("jobs_with_one_thread")

TOLERANCE = 1e-5
"""Of the largest score: float32 products of a few hundred numbers, summed in another order."""

VOCABULARY = 61
KILLED = -signal.SIGKILL


def gpt2() -> nn.Module:
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=VOCABULARY, n_positions=40, n_embd=16, n_layer=1, n_head=2, bos_token_id=1,
                   eos_token_id=1)
    )  # fmt: skip


def llama() -> nn.Module:
    return LlamaForCausalLM(
        LlamaConfig(vocab_size=VOCABULARY, hidden_size=16, intermediate_size=24, num_hidden_layers=1,
                    num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=40)
    )  # fmt: skip


def bert() -> nn.Module:
    return BertForSequenceClassification(
        BertConfig(vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
                   intermediate_size=24, max_position_embeddings=40, num_labels=3)
    )  # fmt: skip


TASKS = {gpt2: "causal_lm", llama: "causal_lm", bert: "text_classification"}


def texts(n: int, seed: int, causal: bool) -> Dataset:
    """Rows of 4 to 19 tokens."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for length in torch.randint(4, 20, (n,), generator=generator).tolist():
        ids = torch.randint(2, VOCABULARY, (length,), generator=generator).tolist()
        rows.append({"input_ids": ids, "labels": ids if causal else length % 3})
    return Dataset.from_list(rows)


class Padding:
    """A collator that pads to the longest row and `extra` more, on one side."""

    def __init__(self, side: str = "right", extra: int = 0) -> None:
        self.side = side
        self.extra = extra

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, Tensor]:
        length = max(len(row["input_ids"]) for row in rows) + self.extra

        def padded(values: list[int], fill: int) -> list[int]:
            rest = [fill] * (length - len(values))
            return rest + values if self.side == "left" else values + rest

        labels = [row["labels"] for row in rows]
        return {
            "input_ids": torch.tensor([padded(row["input_ids"], 0) for row in rows]),
            "attention_mask": torch.tensor([padded([1] * len(row["input_ids"]), 0) for row in rows]),
            "labels": torch.tensor([padded(one, -100) if isinstance(one, list) else one for one in labels]),
        }


def text_scores(
    make: Callable[[], nn.Module],
    directory: Path,
    padding: Padding | None = None,
    block_bytes: int | None = None,
    **options: Any,
) -> Tensor:
    """Exact scores of 13 rows for 3 targets, `(3, 13)`."""
    torch.manual_seed(0)
    model = make().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.02 * torch.randn_like(parameter)
    arguments = {"use_cpu": True, "per_device_batch_size": 4, "shard_size": 8, **options}
    causal = TASKS[make] == "causal_lm"
    attributor = TrakAttributor(
        model,
        trak_config(output_dir=str(directory), **arguments),
        train_dataset=texts(13, 1, causal),
        task=TASKS[make],
        data_collator=padding or Padding(),
    )
    with pytest.MonkeyPatch.context() as patch:
        if block_bytes is not None:
            patch.setenv(BLOCK_BYTES_VARIABLE, str(block_bytes))
        return scores_of(attributor, texts(3, 2, causal))


def scores_of(attributor: TrakAttributor, targets: Any, **options: Any) -> Tensor:
    scored = attributor.attribute(targets, top_k=None, method="exact", **options)
    return scored.with_format("torch")["trak_scores"][:]


def change(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max())


OTHERS = ("shampoo", "kfac", "diagonal", "identity")
"""Curvatures that the slow set tests in the same way."""

CHANGES = {
    "one row at a time": {"per_device_batch_size": 1},
    "batches of five": {"per_device_batch_size": 5},
    "all rows at once": {"per_device_batch_size": 13},
    "longer padding": {"padding": Padding("right", 7)},
    "padding on the left": {"padding": Padding("left", 5)},
    "small slices": {"block_bytes": 1000},
    "targets one by one": {"curvature_memory": 4 * 6000 / 2**30},
}
TOGETHER = {**CHANGES["padding on the left"], **CHANGES["small slices"], **CHANGES["targets one by one"]}


@pytest.fixture(scope="module")
def as_usual(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Tensor]:
    """Scores with batches of four rows that are padded on the right, computed once per model and curvature."""
    known: dict[tuple[Any, str], Tensor] = {}

    def scores(make: Callable[[], nn.Module], curvature: str) -> Tensor:
        if (make, curvature) not in known:
            known[make, curvature] = text_scores(make, tmp_path_factory.mktemp("usual"), curvature=curvature)
        return known[make, curvature]

    return scores


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "options"),
    [(gpt2, CHANGES["one row at a time"]), (gpt2, TOGETHER), (bert, CHANGES["batches of five"])],
    ids=["gpt2, one row at a time", "gpt2, together", "bert, batches of five"],
)
def test_batches_and_padding(
    as_usual: Callable[..., Tensor], tmp_path: Path, make: Callable[[], nn.Module], options: dict[str, Any]
) -> None:
    """Labels drawn from the model are the same ones, whatever batch a row is in. The covariances of BERT's classifier
    have null spaces, whose bases rounding chooses."""
    assert change(text_scores(make, tmp_path, curvature="ekfac", **options), as_usual(make, "ekfac")) < TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("difference", CHANGES)
@pytest.mark.parametrize("make", [gpt2, bert])
@pytest.mark.parametrize("curvature", ["ekfac", "shampoo"])
def test_each_of_batches_and_padding(
    as_usual: Callable[..., Tensor], tmp_path: Path, curvature: str, make: Callable[[], nn.Module], difference: str
) -> None:
    """One change at a time, of two models and curvatures."""
    if make is bert and difference == "padding on the left":
        pytest.skip("positions are absolute: tokens would have other ones")
    options: dict[str, Any] = CHANGES[difference]
    found = text_scores(make, tmp_path, curvature=curvature, **options)
    assert change(found, as_usual(make, curvature)) < TOLERANCE


@pytest.mark.parametrize(
    "curvature", ["ekfac", "hybrid", *(pytest.param(one, marks=pytest.mark.slow) for one in OTHERS)]
)
def test_order_of_rows(tmp_path: Path, curvature: str) -> None:
    """A permuted dataset has permuted scores, with the labels of the data, which are the rows' own."""
    torch.manual_seed(5)
    model, rows, targets = store_jobs.TinyNet(), store_jobs.rows(23, 1), store_jobs.rows(3, 2)
    order = torch.randperm(23).tolist()
    found = []
    for name, dataset in (("as they are", rows), ("permuted", rows.select(order))):
        args = trak_config(
            output_dir=str(tmp_path / name), use_cpu=True, proj_dim=64, shard_size=4,
            per_device_batch_size=3, curvature=curvature, curvature_labels="empirical",
        )  # fmt: skip
        found.append(
            scores_of(TrakAttributor(model, args, train_dataset=dataset, task="image_classification"), targets)
        )
    assert change(found[1], found[0][:, order]) < TOLERANCE


class WithoutBiases(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(6, 5, bias=False)
        self.head = nn.Linear(5, 4, bias=False)

    def forward(self, pixel_values: Tensor) -> Tensor:
        return self.head(torch.tanh(self.body(pixel_values)))


@pytest.mark.slow
@pytest.mark.parametrize(
    "curvature", ["shampoo", *(pytest.param(one, marks=pytest.mark.slow) for one in ("diagonal", "identity"))]
)
def test_engines(tmp_path: Path, curvature: str) -> None:
    """Curvatures that are made of whole gradients, which all engines give. Bases are the same without biases alone:
    these are a column of their layer's matrix where it comes as factors."""
    model, found = WithoutBiases(), {}
    for engine in ("hooked", "functional", "iterative"):
        args = TrakConfig(
            output_dir=str(tmp_path / engine), use_cpu=True, proj_dim=16, curvature=curvature,
            engine=engine,
        )  # fmt: skip
        attributor = TrakAttributor(model, args, train_dataset=store_jobs.rows(23, 1), task="image_classification")
        found[engine] = scores_of(attributor, store_jobs.rows(3, 2))
    assert change(found["functional"], found["hooked"]) < TOLERANCE
    assert change(found["iterative"], found["hooked"]) < TOLERANCE


@pytest.mark.parametrize("engine", ["functional", pytest.param("iterative", marks=pytest.mark.slow)])
def test_bases_do_not_depend_on_the_engine(tmp_path: Path, engine: str) -> None:
    """Though only one engine gives factors, and with biases: the identity of a curvature names no engine."""
    model, found = store_jobs.models(1)[0], {}
    for one in ("auto", engine):
        args = TrakConfig(output_dir=str(tmp_path / one), use_cpu=True, proj_dim=16, engine=one)
        attributor = TrakAttributor(model, args, train_dataset=store_jobs.rows(23, 1), task="image_classification")
        found[one] = scores_of(attributor, store_jobs.rows(3, 2))
    assert change(found[engine], found["auto"]) < TOLERANCE


# -- processes and kills ---------------------------------------------------------------------------------------------


def job(directory: Path, curvature: str = "ekfac") -> dict[str, str]:
    """Fit, score and look at the diagonal of one checkpoint; digests of all files and scores."""
    plan.ROWS_PER_PART = 3  # of 23, so that there are parts to share
    torch.manual_seed(5)
    attributor = store_jobs.make(directory, curvature=curvature)
    attributor.fit_curvature()
    scores = scores_of(attributor, store_jobs.rows(3, 2))
    own = attributor.self_influence(method="exact")
    return {
        **store_jobs.feature_digests(directory),
        "scores": store_jobs.digest(scores),
        "own": store_jobs.digest(own),
    }


def kill_at(name: str, count: int, directory: Path) -> dict[str, Any]:
    """The job, killed right before the `count`-th file whose name starts with `name` becomes visible."""
    seen = 0

    def watched(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(source: Any, target: Any, **options: Any) -> Any:
            nonlocal seen
            seen += Path(target).name.startswith(name)
            if seen == count:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(source, target, **options)

        return call

    for call in ("replace", "link"):
        setattr(atomic.os, call, watched(getattr(os, call)))
    return job(directory)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a job reports that is left alone."""
    directory = tmp_path_factory.mktemp("reference")
    report = Job(directory / "report.json", job, directory / "store").wait()
    assert report is not None and "value" in report
    return report


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_more_processes(reference: dict[str, Any], tmp_path: Path, world: int) -> None:
    reports = [job.wait() for job in start_group(tmp_path, world, job, tmp_path / "store")]
    assert reports == [reference] * world


STAGES = {
    "blocks": 1, "bases": 3, "basis": 2, "squares": 4, "block-": 2, "curvature.json": 1, "preconditioned": 1,
    "scores-": 3, "self-influence": 3,
}  # fmt: skip
"""The kinds of files in their order, and before which one of each the job is killed."""

Kept = dict[Path, int]


def kill(stage: str, directory: Path) -> Kept:
    """Run the job until it is killed; all files that are whole by then, with the times of their last change."""
    store = directory / "store"
    killed = Job(directory / "report.json", kill_at, stage, STAGES[stage], store)
    assert killed.wait() is None and killed.process.exitcode == KILLED
    return {path: path.stat().st_mtime_ns for path in store.rglob("*.safetensors") if "hf_trak-tmp" not in path.name}


def unchanged(kept: Kept) -> bool:
    """Tell whether files are as they were. Blocks have one file each, and are written anew."""
    return all(path.stat().st_mtime_ns == kept[path] for path in kept if path.exists() and "block-" not in path.name)


@pytest.mark.slow
def test_killed_again_and_again(reference: dict[str, Any], tmp_path: Path) -> None:
    """In every pass: before a file becomes visible. The same call goes on, and ends with the same bits."""
    kept: Kept = {}
    for stage in ("bases", "basis", "squares", "preconditioned", "scores-", "self-influence"):
        found = kill(stage, tmp_path)
        assert unchanged(kept) and found != kept
        kept = found
    assert Job(tmp_path / "report.json", job, tmp_path / "store").wait() == reference
    assert unchanged(kept)


@pytest.mark.slow
@pytest.mark.parametrize("stage", STAGES)
def test_killed(reference: dict[str, Any], tmp_path: Path, stage: str) -> None:
    """Once, in each of the passes."""
    kept = kill(stage, tmp_path)
    assert Job(tmp_path / "report.json", job, tmp_path / "store").wait() == reference
    assert unchanged(kept)


def kill_before_cleaning(directory: Path) -> dict[str, Any]:
    """The job, killed when the curvature is complete, and what only a resumed fit needs is still there."""

    def die(*arguments: Any, **options: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    lease.shutil = SimpleNamespace(rmtree=die)  # type: ignore[attr-defined]
    return job(directory)


@pytest.mark.slow
def test_killed_before_cleaning(reference: dict[str, Any], tmp_path: Path) -> None:
    killed = Job(tmp_path / "report.json", kill_before_cleaning, tmp_path / "store")
    assert killed.wait() is None and killed.process.exitcode == KILLED
    assert (tmp_path / "store" / "curvature" / "0" / "curvature.json").exists()
    assert Job(tmp_path / "report.json", job, tmp_path / "store").wait() == reference
