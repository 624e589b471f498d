"""Whatever is changed between two calls is noticed, or changes nothing: settings, models, rows, collators, functions.

Each change is tried between `featurize` and a `featurize` that resumes, and between `featurize` and `attribute`. What
cannot be noticed is listed in `docs/troubleshooting.md` with the reason.
"""

import dataclasses
import functools
import logging
import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from torch import Tensor
from trak_options import trak_config
from transformers import BertConfig, BertForSequenceClassification

from hf_trak import TrakAttributor, TrakConfig
from hf_trak.config import CurvatureConfig
from hf_trak.errors import HfTrakError
from hf_trak.gradient_computers.hooked.computer import HookedGradientComputer
from hf_trak.identity import model_identity
from hf_trak.modelout_functions import FunctionModelOutput

N, M, LENGTH = 11, 3, 6
SCALE = 1.0


class Classifier(BertForSequenceClassification):
    """A model of a user's own."""

    factor = 1.0


def model(**config: Any) -> BertForSequenceClassification:
    torch.manual_seed(3)
    settings: dict[str, Any] = {
        "vocab_size": 24, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8,
        "max_position_embeddings": 8, "num_labels": 3, "layer_norm_eps": 1e-12,
    }  # fmt: skip
    return Classifier(BertConfig(**{**settings, **config})).eval()


def rows(start: int, count: int) -> Dataset:
    words = [[(7 * i + 3 * j * j) % 23 + 1 for j in range(LENGTH)] for i in range(start, start + count)]
    return Dataset.from_dict({"input_ids": words, "labels": [i % 3 for i in range(start, start + count)]})


def collate(batch: list[dict[str, Any]], keep: int = LENGTH, fill: int = 0) -> dict[str, Tensor]:
    words = torch.tensor([[*row["input_ids"][:keep], *[fill] * (LENGTH - keep)] for row in batch])
    return {"input_ids": words, "labels": torch.tensor([row["labels"] for row in batch])}


def correct(outputs: Any, batch: Any) -> Tensor:
    return outputs.logits.gather(1, batch["labels"].unsqueeze(1)).squeeze(1)


def scaled(outputs: Any, batch: Any) -> Tensor:
    return SCALE * correct(outputs, batch)


def weighted(outputs: Any, batch: Any, weight: float = 1.0) -> Tensor:
    return weight * correct(outputs, batch)


def closing_over(weight: float) -> Callable[..., Tensor]:
    def output(outputs: Any, batch: Any) -> Tensor:
        return weight * correct(outputs, batch)

    return output


@dataclass(frozen=True)
class Setup:
    """What an attributor is made of."""

    model: Callable[[], torch.nn.Module] = model
    train: Callable[[], Any] = lambda: rows(0, N)
    collator: Callable[..., Any] = collate
    task: Any = "text_classification"
    settings: dict[str, Any] = field(default_factory=dict)

    def attributor(self, directory: Path) -> TrakAttributor:
        base = {"proj_dim": 16, "shard_size": 4, "per_device_batch_size": 4, "use_cpu": True}
        args = trak_config(**{"output_dir": str(directory), **base, **self.settings})
        task = self.task() if isinstance(self.task, functools.partial) else self.task
        return TrakAttributor(self.model(), args, self.train(), self.collator, task=task)


def patched(module: str, **attributes: Any) -> Callable[[], torch.nn.Module]:
    def made() -> torch.nn.Module:
        network = model()
        for name, value in attributes.items():
            setattr(network.get_submodule(module), name, value)
        return network

    return made


def with_hook() -> torch.nn.Module:
    network = model()
    network.bert.register_forward_hook(lambda module, args, output: None)
    return network


def with_forward() -> torch.nn.Module:
    network = model()
    forward = network.forward

    @functools.wraps(forward)  # with its signature, by which columns are chosen
    def call(*args: Any, **kwargs: Any) -> Any:
        outputs = forward(*args, **kwargs)
        outputs.logits = outputs.logits.square()
        return outputs

    network.forward = call  # type: ignore[method-assign]
    return network


def other_weights() -> torch.nn.Module:
    network = model()
    with torch.no_grad():
        network.classifier.bias[0] += 0.25
    return network


def other_row() -> Dataset:
    changed = rows(0, N).to_list()
    changed[7]["input_ids"] = changed[7]["input_ids"][::-1]
    return Dataset.from_list(changed)


def with_transform(step: int) -> Dataset:
    def transform(batch: dict[str, Any]) -> dict[str, Any]:
        return {**batch, "input_ids": [[(word + step) % 24 for word in words] for words in batch["input_ids"]]}

    data = rows(0, N)
    data.set_transform(transform)
    return data


FUNCTION = Setup(task=functools.partial(FunctionModelOutput, correct))
PARTIAL = Setup(task=functools.partial(FunctionModelOutput, functools.partial(weighted, weight=1.0)))
CLOSURE = Setup(task=functools.partial(FunctionModelOutput, closing_over(1.0)))
LAMBDA = Setup(task=functools.partial(FunctionModelOutput, lambda outputs, batch: correct(outputs, batch)))
TRANSFORMED = Setup(train=functools.partial(with_transform, 1))

CHANGES: dict[str, tuple[Setup, Setup]] = {
    "layer_norm_eps": (Setup(), Setup(model=functools.partial(model, layer_norm_eps=0.1))),
    "activation": (Setup(), Setup(model=functools.partial(model, hidden_act="relu"))),
    "heads": (Setup(), Setup(model=functools.partial(model, num_attention_heads=4))),
    "a module's attribute": (
        Setup(),
        Setup(model=patched("bert.encoder.layer.0.attention.output.LayerNorm", eps=0.1)),
    ),
    "an attribute of the user's class": (Setup(), Setup(model=patched("", factor=2.0))),
    "a hook": (Setup(), Setup(model=with_hook)),
    "a forward of the instance": (Setup(), Setup(model=with_forward)),
    "weights": (Setup(), Setup(model=other_weights)),
    "a row": (Setup(), Setup(train=other_row)),
    "the order of rows": (Setup(), Setup(train=lambda: rows(0, N).select([*range(1, N), 0]))),
    "the type of a column": (Setup(), Setup(train=lambda: rows(0, N).cast_column("labels", _int32()))),
    "more rows": (Setup(), Setup(train=functools.partial(rows, 0, N + 1))),
    "rows of a list": (Setup(train=lambda: rows(0, N).to_list()), Setup(train=lambda: other_row().to_list())),
    "a transform": (TRANSFORMED, replace(TRANSFORMED, train=functools.partial(with_transform, 2))),
    "truncation": (Setup(), Setup(collator=functools.partial(collate, keep=4))),
    "padding": (
        Setup(collator=functools.partial(collate, keep=4)),
        Setup(collator=functools.partial(collate, keep=4, fill=3)),
    ),
    "another function": (FUNCTION, replace(FUNCTION, task=functools.partial(FunctionModelOutput, weighted))),
    "another lambda": (
        LAMBDA,
        replace(LAMBDA, task=functools.partial(FunctionModelOutput, lambda outputs, batch: -correct(outputs, batch))),
    ),
    "another closure": (CLOSURE, replace(CLOSURE, task=functools.partial(FunctionModelOutput, closing_over(2.0)))),
    "a partial argument": (
        PARTIAL,
        replace(PARTIAL, task=functools.partial(FunctionModelOutput, functools.partial(weighted, weight=2.0))),
    ),
    "another task": (Setup(), Setup(task="loss")),
}
"""What an attributor is made of before, and after."""

DEFINING: dict[str, Any] = {
    "proj_type": "rademacher", "proj_dim": 17, "seed": 1, "grad_wrt": ["classifier.weight"],
    "feature_dtype": "float16", "model_dtype": "bfloat16", "shard_size": 5,
    "curvature_whitened": True,
}  # fmt: skip
"""Fields of `TrakConfig` whose change is refused."""

HARMLESS: dict[str, Any] = {
    "num_draws": 3,  # of rows that are not drawn at random
    "engine": "iterative", "per_device_batch_size": 3, "use_cpu": True,
    "remove_unused_columns": False, "label_names": ["labels"], "curvature_memory": 1e-4,
    "solver": "dual", "budget": "best",
}  # fmt: skip
"""Fields whose change leaves features as they are, but for rounding: what reaches the model is probed."""

RESULTS = {"lambda_relative": 3.0}
"""Fields that scores depend on and features do not: each value has results of its own."""

EXACT = {
    "curvature": "diagonal",
    "curvature_rows": 3,
    "curvature_labels": "empirical",
    "curvature_damping": 5.0,
    "curvature_hybrid_lambda": 0.1,
    "curvature_dtype": "bfloat16",
    "curvature_rank": 1,
}
"""Fields that exact scores depend on, and nothing else."""


def _int32() -> Any:
    from datasets import Value

    return Value("int32")


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    logging.getLogger("hf_trak").setLevel(logging.ERROR)
    yield
    logging.getLogger("hf_trak").setLevel(logging.NOTSET)


@pytest.fixture(scope="module")
def featurized(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Setup], Path]:
    """Directories of featurized setups, each made once."""
    made: dict[int, tuple[Setup, Path]] = {}

    def get(setup: Setup) -> Path:
        if id(setup) not in made:
            directory = tmp_path_factory.mktemp("store") / "trak"
            setup.attributor(directory).featurize()
            made[id(setup)] = (setup, directory)
        return made[id(setup)][1]

    return get


BASE = Setup()


def copied(featurized: Callable[[Setup], Path], setup: Setup, tmp_path: Path, resume: bool) -> Path:
    directory = tmp_path / "trak"
    shutil.copytree(featurized(BASE if setup == BASE else setup), directory)
    if resume:
        for name in ("train-00001-of-00003.safetensors", "gram.safetensors"):
            (directory / "checkpoint-0" / name).unlink()
    return directory


def ask(attributor: TrakAttributor, resume: bool) -> Any:
    if resume:
        return attributor.featurize()
    return attributor.attribute(rows(50, M), top_k=None)


@pytest.mark.parametrize("resume", [True, False], ids=["resume", "attribute"])
@pytest.mark.parametrize("what", CHANGES)
def test_changes_are_noticed(featurized: Callable[[Setup], Path], tmp_path: Path, what: str, resume: bool) -> None:
    before, after = CHANGES[what]
    directory = copied(featurized, before, tmp_path, resume)
    shards = {path: path.read_bytes() for path in directory.rglob("*.safetensors")}
    with pytest.raises((HfTrakError, ValueError)) as caught:
        ask(after.attributor(directory), resume)
    assert any(word in str(caught.value) for word in ("xpected", "saved", "was given"))
    assert {path: path.read_bytes() for path in directory.rglob("*.safetensors")} == shards  # nothing was written


@pytest.mark.slow
def test_the_same_inputs_are_accepted(featurized: Callable[[Setup], Path], tmp_path: Path) -> None:
    """Without which the tests above would show nothing."""
    for number, setup in enumerate([BASE, FUNCTION, PARTIAL, CLOSURE, LAMBDA, TRANSFORMED]):
        directory = copied(featurized, setup, tmp_path / str(number), resume=True)
        ask(setup.attributor(directory), resume=True)
        ask(setup.attributor(directory), resume=False)


def test_every_field_of_the_configuration_is_tried() -> None:
    nested = {f"curvature_{one.name}" for one in dataclasses.fields(CurvatureConfig)} - {"curvature_kind"}
    names = {one.name for one in dataclasses.fields(TrakConfig)} - {"output_dir"} | nested
    assert names == {*DEFINING, *HARMLESS, *RESULTS, *EXACT}


@pytest.mark.parametrize("resume", [True, False], ids=["resume", "attribute"])
@pytest.mark.parametrize("name", DEFINING)
def test_defining_settings(featurized: Callable[[Setup], Path], tmp_path: Path, name: str, resume: bool) -> None:
    directory = copied(featurized, BASE, tmp_path, resume)
    with pytest.raises(HfTrakError, match="saved"):
        ask(Setup(settings={name: DEFINING[name]}).attributor(directory), resume)


@pytest.mark.few(2)
@pytest.mark.parametrize("name", HARMLESS)
def test_other_settings_change_rounding_at_most(
    featurized: Callable[[Setup], Path], tmp_path: Path, name: str
) -> None:
    whole = BASE.attributor(featurized(BASE))
    directory = copied(featurized, BASE, tmp_path, resume=True)
    attributor = Setup(settings={name: HARMLESS[name]}).attributor(directory).featurize()
    for before, after in zip(whole.features.store.train(0), attributor.features.store.train(0), strict=True):
        # float32 gradients of a few thousand additions, in another order
        torch.testing.assert_close(after.grads, before.grads, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", RESULTS)
def test_settings_of_scores_have_results_of_their_own(
    featurized: Callable[[Setup], Path], tmp_path: Path, name: str
) -> None:
    directory = copied(featurized, BASE, tmp_path, resume=False)
    first = BASE.attributor(directory).attribute(rows(50, M), top_k=None)
    kept = np.stack(first.with_format("numpy")["trak_scores"][:]).copy()
    second = Setup(settings={name: RESULTS[name]}).attributor(directory).attribute(rows(50, M), top_k=None)
    assert not np.allclose(np.stack(second.with_format("numpy")["trak_scores"][:]), kept)
    assert np.array_equal(np.stack(first.with_format("numpy")["trak_scores"][:]), kept)


HYBRID = Setup(settings={"curvature": "hybrid", "curvature_damping": 1.0})


def scores_of(setup: Setup, directory: Path, exact: bool) -> np.ndarray:
    scored = setup.attributor(directory).attribute(rows(50, M), top_k=None, method="exact" if exact else "index")
    return np.stack(scored.with_format("numpy")["trak_scores"][:]).copy()


@pytest.fixture(scope="module")
def scored_exactly(
    featurized: Callable[[Setup], Path], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, np.ndarray, np.ndarray]:
    """A directory with a curvature; scores of its features, and exact ones."""
    directory = copied(featurized, BASE, tmp_path_factory.mktemp("exact"), resume=False)
    return directory, scores_of(HYBRID, directory, False), scores_of(HYBRID, directory, True)


@pytest.mark.few(2)
@pytest.mark.parametrize("name", EXACT)
def test_settings_of_exact_scores(
    scored_exactly: tuple[Path, np.ndarray, np.ndarray], tmp_path: Path, name: str
) -> None:
    """Scores of features stay; exact ones differ, or are refused where the curvature is another one."""
    made, plain, exact = scored_exactly
    directory = Path(shutil.copytree(made, tmp_path / "trak"))
    changed = Setup(settings={**HYBRID.settings, name: EXACT[name]})
    assert np.array_equal(scores_of(changed, directory, False), plain)
    if name in ("curvature_damping", "curvature_hybrid_lambda", "curvature_dtype", "curvature_rank"):
        assert not np.allclose(scores_of(changed, directory, True), exact)
    else:
        with pytest.raises(HfTrakError, match="The curvature in"):
            scores_of(changed, directory, True)
    assert np.array_equal(scores_of(HYBRID, directory, True), exact)


def test_changes_within_one_process_are_noticed(tmp_path: Path) -> None:
    attributor = BASE.attributor(tmp_path).featurize()
    attributor.attribute(rows(50, M))
    attributor.model.bert.embeddings.LayerNorm.eps = 0.1
    with pytest.raises(HfTrakError, match="eps"):
        attributor.attribute(rows(60, M))
    attributor.model.bert.embeddings.LayerNorm.eps = 1e-12
    attributor.features.data_collator = functools.partial(collate, keep=4)
    with pytest.raises(HfTrakError, match="input_ids"):
        attributor.featurize()


def test_rows_of_a_list_that_change_in_place_are_noticed(tmp_path: Path) -> None:
    listed = list(rows(0, N))
    attributor = TrakAttributor(
        model(), trak_config(output_dir=str(tmp_path), use_cpu=True), listed, data_collator=collate
    ).featurize()
    attributor.attribute(rows(50, M))
    listed[3] = rows(40, 1)[0]
    with pytest.raises(HfTrakError, match="train_fingerprint"):
        attributor.attribute(rows(50, M))


def test_target_features_are_not_used_with_another_collator(tmp_path: Path) -> None:
    """The training rows are shorter than what the collators differ in; the targets are not."""
    short = rows(0, N).map(lambda row: {"input_ids": [*row["input_ids"][:4], 0, 0]})
    setup = Setup(train=lambda: short)
    setup.attributor(tmp_path).featurize().attribute(rows(50, M), name="exam")
    with pytest.raises(HfTrakError, match=r"Experiment 'exam'.*\n.*input_ids"):
        replace(setup, collator=functools.partial(collate, keep=4)).attributor(tmp_path).attribute(
            rows(50, M), name="exam"
        )


@pytest.mark.parametrize("resume", [True, False], ids=["resume", "attribute"])
def test_packages_that_compute_otherwise_are_noticed(
    featurized: Callable[[Setup], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, resume: bool
) -> None:
    """Another version of a package, which no identity can be compared across: rows are computed again."""
    directory = copied(featurized, BASE, tmp_path, resume)
    versions = model_identity.versions()
    monkeypatch.setattr(model_identity, "versions", lambda: {**versions, "torch": "99.0"})
    ask(BASE.attributor(shutil.copytree(directory, tmp_path / "fine")), resume)  # which computes the same
    stream = HookedGradientComputer.stream

    def other(self: Any, batch: Any, sink: Any, side: Any = "train") -> Any:
        return stream(self, batch, _Louder(sink), side)

    monkeypatch.setattr(HookedGradientComputer, "stream", other)
    monkeypatch.setattr("hf_trak.gradient_computers.auto.AutoGradientComputer._check", lambda *args: None)
    with pytest.raises(HfTrakError, match=r"train row 0 computed now differ by 5.0%.*versions of packages"):
        ask(BASE.attributor(directory), resume)


class _Louder:
    """A sink whose gradients are 5 % larger."""

    def __init__(self, sink: Any) -> None:
        self.sink = sink
        self.takes_outer = False

    def __call__(self, start: int, block: Tensor) -> None:
        self.sink(start, 1.05 * block)


class Random:
    """A collator that masks words at random."""

    def __call__(self, batch: list[dict[str, Any]]) -> dict[str, Tensor]:
        made = collate(batch)
        return {**made, "input_ids": made["input_ids"].masked_fill(torch.rand(made["input_ids"].shape) < 0.3, 0)}


class Unseeded(Random):
    """The same, with numbers of the operating system."""

    def __call__(self, batch: list[dict[str, Any]]) -> dict[str, Tensor]:
        torch.manual_seed(random.SystemRandom().getrandbits(32))
        return super().__call__(batch)


def test_rows_drawn_at_random(featurized: Callable[[Setup], Path], tmp_path: Path) -> None:
    """Those that seeds repeat are accepted, but not in the place of fixed ones; others are refused."""
    with pytest.raises(ValueError, match=r"input_ids.*given the same seeds"):
        Setup(collator=Unseeded()).attributor(tmp_path / "new").featurize()
    assert not (tmp_path / "new").exists()
    Setup(collator=Random()).attributor(tmp_path / "random").featurize()
    directory = copied(featurized, BASE, tmp_path, resume=False)
    with pytest.raises(HfTrakError, match=r"draws of each row: saved 0, given 1 \(0: rows are not drawn at random\)"):
        Setup(collator=Random()).attributor(directory).attribute(rows(50, M))
