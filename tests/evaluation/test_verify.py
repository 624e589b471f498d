"""One small training step on found rows: planted causes are seen, random rows have no effect, all is put back."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from torch import Tensor, nn
from trak_options import trak_config
from transformers import GPT2Config, GPT2LMHeadModel

from hf_trak import TrakAttributor
from hf_trak.errors import CheckpointMismatchError, IncompleteStoreError, NonFiniteError
from hf_trak.evaluation.tail_patch import PatchResult, verify_rows
from hf_trak.evaluation.trial_steps import TrialSteps
from hf_trak.weights.checkpoints import fingerprint_state_dict

N, CLASSES, WIDTH = 240, 8, 12
PLANTED = [7, 40, 77, 101]
"""Rows with the image of the target, and a wrong label."""


class Classifier(nn.Module):
    """Two layers and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, 24), nn.Linear(24, CLASSES)
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Tensor:
        return self.second(self.dropout(torch.relu(self.first(x))))


class Counting(Classifier):
    """It has a buffer that every forward pass changes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.full((), 3.0), persistent=False)

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Tensor:
        self.calls.add_(1)
        return super().forward(x)


def blobs(seed: int = 0) -> tuple[Tensor, Tensor]:
    """Noisy points around one centre for each class."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(N) % CLASSES
    centres = 2 * torch.eye(CLASSES, WIDTH)
    return centres[labels] + 0.3 * torch.randn(N, WIDTH, generator=generator), labels


def trained(x: Tensor, labels: Tensor, steps: int = 60) -> Classifier:
    """Train a classifier without dropout, so that wrong labels are learnt, too."""
    model = Classifier().eval()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    for _ in range(steps):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), labels).backward()
        optimizer.step()
    model.zero_grad(set_to_none=True)
    return model


def rows_of(x: Tensor, labels: Tensor) -> Dataset:
    return Dataset.from_dict({"x": x.tolist(), "labels": labels.tolist()}).with_format("torch")


def attributor(model: nn.Module, train: Any, directory: Path, task: str = "image_classification", **options: Any):
    args = trak_config(str(directory), **{"proj_dim": 64, "use_cpu": True, "per_device_batch_size": 8} | options)
    return TrakAttributor(model, args, train_dataset=train, task=task)


@pytest.fixture(scope="module")
def planted() -> tuple[Classifier, Dataset, Dataset]:
    """A model that has learnt wrong labels of copies of one image, its rows, and that image with its right label."""
    torch.manual_seed(0)
    x, labels = blobs()
    x[PLANTED] = x[0] + 0.05 * torch.randn(len(PLANTED), WIDTH)
    labels[PLANTED] = (labels[0] + 1) % CLASSES
    target = rows_of(x[:1] + 0.02, labels[:1])
    return trained(x, labels), rows_of(x, labels), target


@pytest.fixture
def own(planted: tuple[Classifier, Dataset, Dataset], tmp_path: Path) -> TrakAttributor:
    return attributor(planted[0], planted[1], tmp_path / "trak")


def test_duplicates_with_a_wrong_label_lower_the_output(own: TrakAttributor, planted: Any) -> None:
    found = own.verify(planted[2], PLANTED)
    assert found.has_effect and found.change < 0 and found.ratio < -5
    assert found.change < min(found.random)
    assert "lowers" in found.verdict and f"{abs(found.ratio):.1f} times" in found.verdict
    # other rows of the right class are what looks like the target, and help it
    assert found.similar is not None and found.similar > found.change
    assert not set(found.similar_rows) & set(PLANTED)


def test_they_raise_the_output_of_their_own_label(own: TrakAttributor, planted: Any) -> None:
    wrong = rows_of(planted[2]["x"][:], (planted[2]["labels"][:] + 1) % CLASSES)
    found = own.verify(wrong, PLANTED, similar=None)
    assert found.has_effect and found.change > max(found.random)
    assert "raises" in found.verdict and found.similar is None and found.similar_rows == ()


@pytest.mark.slow
def test_attribution_finds_rows_with_an_effect(own: TrakAttributor, planted: Any) -> None:
    scored = own.featurize().attribute(planted[2], top_k=4)
    assert set(scored[0]["trak_harmful_indices"]) == set(PLANTED)
    found = own.verify(planted[2], scored[0]["trak_harmful_indices"])
    assert found.has_effect and found.change < 0
    assert own.verify(planted[2], scored[0]["trak_indices"]).change > 0


@pytest.mark.few(2)
@pytest.mark.parametrize("seed", range(4))
def test_random_rows_have_no_effect(own: TrakAttributor, planted: Any, seed: int) -> None:
    others = np.setdiff1d(np.arange(N), PLANTED)
    rows = np.random.default_rng(seed).choice(others, 12, replace=False)
    found = own.verify(planted[2], rows, draws=24)
    assert not found.has_effect
    assert found.verdict.startswith("No effect")


def test_the_step_is_one_of_plain_gradient_descent(own: TrakAttributor, planted: Any) -> None:
    """Beside a step that is taken by `torch.optim.SGD` on the mean cross-entropy, in float64."""
    import copy

    found = own.verify(planted[2], PLANTED, similar=[1, 2, 3, 4], draws=4)
    x, labels = planted[1]["x"][:].double(), planted[1]["labels"][:]

    def output(model: nn.Module) -> float:
        logits, label = model(planted[2]["x"][:].double())[0], int(planted[2]["labels"][0])
        return float(logits[label] - torch.cat([logits[:label], logits[label + 1 :]]).logsumexp(0))

    def change(rows: list[int]) -> float:
        model = copy.deepcopy(planted[0]).double().eval()
        before = output(model)
        nn.functional.cross_entropy(model(x[rows]), labels[rows]).backward()
        torch.optim.SGD(model.parameters(), lr=found.learning_rates[0]).step()
        return output(model) - before

    # float32 outputs of a size around 5 are rounded to 5e-7, and the changes are differences of two of them
    assert found.change == pytest.approx(change(PLANTED), abs=5e-6)
    assert found.similar == pytest.approx(change([1, 2, 3, 4]), abs=5e-6)
    assert abs(found.change) > 1000 * 5e-6
    assert found.linearity == pytest.approx(1, abs=0.1)


def test_nothing_is_left_behind(planted: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Counting()
    model.load_state_dict(planted[0].state_dict())
    own = attributor(model, planted[1], tmp_path / "trak")
    model.train()
    model.first.bias.requires_grad_(False)
    model.second.bias.grad = torch.ones(CLASSES)
    before, tensors = fingerprint_state_dict(model.state_dict()), dict(model.named_parameters())

    def unchanged() -> None:
        assert fingerprint_state_dict(model.state_dict()) == before and float(model.calls) == 3
        assert model.training and model.dropout.training
        assert not model.first.bias.requires_grad and model.first.weight.requires_grad
        assert torch.equal(model.second.bias.grad, torch.ones(CLASSES)) and model.first.weight.grad is None
        assert all(parameter is tensors[name] for name, parameter in model.named_parameters())

    own.verify(planted[2], PLANTED, draws=4)
    unchanged()
    # an error amid a step
    real, calls = TrialSteps.output, []

    def failing(self: TrialSteps) -> float:
        calls.append(1)
        if len(calls) == 5:
            raise RuntimeError("stop")
        return real(self)

    monkeypatch.setattr(TrialSteps, "output", failing)
    with pytest.raises(RuntimeError, match="stop"):
        own.verify(planted[2], PLANTED, draws=4)
    unchanged()


def test_weights_of_half_precision_are_put_back(planted: Any, tmp_path: Path) -> None:
    """In bfloat16 the step would round away; it is taken in float32."""
    import copy

    model = copy.deepcopy(planted[0]).bfloat16()
    x, labels = planted[1]["x"][:].bfloat16(), planted[1]["labels"][:]
    train = [{"x": one, "labels": label} for one, label in zip(x, labels, strict=True)]
    target = [{"x": planted[2]["x"][0].bfloat16(), "labels": planted[2]["labels"][0]}]
    own = attributor(model, train, tmp_path / "half")
    before = fingerprint_state_dict(model.state_dict())
    found = own.verify(target, PLANTED)
    assert fingerprint_state_dict(model.state_dict()) == before
    assert {one.dtype for one in model.parameters()} == {torch.bfloat16}
    assert found.has_effect and found.change < 0
    whole = attributor(planted[0], planted[1], tmp_path / "whole").verify(planted[2], PLANTED)
    assert found.change == pytest.approx(whole.change, rel=0.1)  # weights that are rounded to 8 bits


@pytest.mark.slow
def test_checkpoints_are_averaged(planted: Any, tmp_path: Path) -> None:
    x, labels = blobs()
    torch.manual_seed(1)
    other = trained(x, labels, steps=20)
    states = [planted[0].state_dict(), other.state_dict()]
    states = [{name: value.clone() for name, value in state.items()} for state in states]
    own = attributor(planted[0], planted[1], tmp_path / "trak").featurize(states)
    before = fingerprint_state_dict(own.model.state_dict())
    both = own.verify(planted[2], PLANTED, draws=4, similar=None)
    single = [own.verify(planted[2], PLANTED, draws=4, similar=None, checkpoints=[one]) for one in (0, 1)]
    assert both.model_ids == (0, 1)
    assert both.change == pytest.approx(np.mean([one.change for one in single]))
    assert both.random == pytest.approx(np.mean([one.random for one in single], axis=0))
    assert both.learning_rates == tuple(one.learning_rates[0] for one in single)
    assert single[0].change != single[1].change
    assert fingerprint_state_dict(own.model.state_dict()) == before
    with pytest.raises(CheckpointMismatchError):
        own.verify(planted[2], PLANTED, checkpoints=states[::-1])
    with pytest.raises(IncompleteStoreError):
        own.verify(planted[2], PLANTED, checkpoints=[5])
    assert own.features.store.model_ids == [0, 1]


PHRASE = [41, 42, 43, 44, 45, 46]
HOLDERS = [5, 23, 48]
"""Documents with the phrase."""


@pytest.fixture(scope="module")
def language() -> tuple[GPT2LMHeadModel, Dataset, Dataset]:
    """A language model, 60 documents, and a target: a beginning that no document has, then the phrase."""
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    length = 16
    # every document counts upwards from somewhere; tokens from 40 on are in the phrase alone
    starts = torch.randint(0, 40, (60, 1), generator=generator)
    documents = (starts + torch.arange(length)) % 40
    for row in HOLDERS:
        documents[row, 6 : 6 + len(PHRASE)] = torch.tensor(PHRASE)
    config = GPT2Config(
        vocab_size=48, n_embd=32, n_layer=2, n_head=2, n_positions=length, bos_token_id=None, eos_token_id=None,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    model = GPT2LMHeadModel(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for _ in range(40):
        optimizer.zero_grad()
        model(input_ids=documents, labels=documents).loss.backward()
        optimizer.step()
    model.zero_grad(set_to_none=True)
    target = torch.cat([torch.tensor([3, 30, 9, 11]), torch.tensor(PHRASE)])[None]
    labels = torch.where(torch.arange(target.shape[1]) >= 5, target, -100)  # the phrase after its first token
    train = Dataset.from_dict({"input_ids": documents.tolist(), "labels": documents.tolist()})
    return model.eval(), train, Dataset.from_dict({"input_ids": target.tolist(), "labels": labels.tolist()})


@pytest.mark.slow
def test_a_phrase_of_three_documents(language: Any, tmp_path: Path) -> None:
    model, train, target = language
    own = attributor(model, train, tmp_path / "trak", task="causal_lm")
    found = own.verify(target, HOLDERS)
    assert found.has_effect and found.change > 0 and found.ratio > 5
    assert found.similar is not None and found.change > 2 * found.similar
    assert not own.verify(target, [1, 2, 3]).has_effect


def test_bm25_finds_rows_by_their_tokens(language: Any, tmp_path: Path) -> None:
    model, train, target = language
    own = attributor(model, train, tmp_path / "trak", task="causal_lm")
    found = own.verify(target, HOLDERS[:1], similar="bm25", draws=4)
    assert set(found.similar_rows) < set(HOLDERS)
    others = own.verify(target, [1, 2, 3], similar="bm25", draws=4)
    assert set(others.similar_rows) == set(HOLDERS)
    assert "bm25" in others.similar_by and "resemblance" not in others.verdict


def test_lora_moves_the_adapter_alone(language: Any, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    import copy

    torch.manual_seed(0)
    adapted = peft.get_peft_model(
        copy.deepcopy(language[0]), peft.LoraConfig(r=4, target_modules=["c_attn"], init_lora_weights=False)
    )
    own = attributor(adapted, language[1], tmp_path / "trak", task="causal_lm")
    before = fingerprint_state_dict(adapted.state_dict())
    found = own.verify(language[2], HOLDERS)
    assert found.change > max(found.random)
    assert fingerprint_state_dict(adapted.state_dict()) == before


def test_errors_say_what_to_do(own: TrakAttributor, planted: Any) -> None:
    target = planted[2]
    with pytest.raises(ValueError, match=r"`target` has 2 rows.*select\(\[0\]\)"):
        own.verify(planted[1].select([0, 1]), PLANTED)
    with pytest.raises(TypeError, match="target"):
        own.verify(planted[1][0], PLANTED)
    for rows in ([], "abc", 5, [1.5], [True]):
        with pytest.raises(ValueError, match="list of numbers of training rows"):
            own.verify(target, rows)
    with pytest.raises(ValueError, match=f"the row {N}.*from 0 to {N - 1}"):
        own.verify(target, [0, N])
    with pytest.raises(ValueError, match="the row -1"):
        own.verify(target, [-1])
    with pytest.raises(ValueError, match="a row twice"):
        own.verify(target, [1, 1])
    with pytest.raises(ValueError, match="at most half"):
        own.verify(target, range(N // 2 + 1))
    with pytest.raises(ValueError, match="`draws` is 3"):
        own.verify(target, [1], draws=3)
    with pytest.raises(ValueError, match="`similar` is 'nearest'"):
        own.verify(target, [1], similar="nearest")
    with pytest.raises(ValueError, match="`similar` has the row"):
        own.verify(target, [1], similar=[N])


def test_rows_without_gradients_are_named(language: Any, tmp_path: Path) -> None:
    unlabelled = language[1].map(lambda row: {"labels": [-100] * len(row["labels"])})
    own = attributor(language[0], unlabelled, tmp_path / "trak", task="causal_lm")
    with pytest.raises(ValueError, match="have a gradient"):
        own.verify(language[2], [1, 2])
    model, train = language[0], language[1]
    saved = model.lm_head.weight.data.clone()
    try:
        model.lm_head.weight.data[0, 0] = torch.nan
        with pytest.raises(NonFiniteError):
            attributor(model, train, tmp_path / "nan", task="causal_lm").verify(language[2], [1, 2], similar=None)
    finally:
        model.lm_head.weight.data.copy_(saved)


def test_models_without_a_head_need_another_control(planted: Any, tmp_path: Path) -> None:
    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(CLASSES, WIDTH) / 4)

        def forward(self, x: Tensor, labels: Tensor | None = None) -> Tensor:
            return x @ self.weight.T

    own = attributor(Bare(), planted[1], tmp_path / "trak")
    with pytest.raises(ValueError, match="ends in no linear layer"):
        own.verify(planted[2], [1, 2], draws=4)
    assert own.verify(planted[2], [1, 2], similar=None, draws=4).similar is None


def result(**changes: Any) -> PatchResult:
    values = {
        "rows": (1, 2), "train_rows": 50, "model_ids": (0,), "output": 1.0, "change": 0.5,
        "random": (-0.1, 0.0, 0.1, 0.0), "similar": 0.2, "similar_rows": (3, 4), "similar_by": "embeddings",
        "learning_rates": (0.1,), "linearity": 0.98, "rounding": 1e-6,
    }  # fmt: skip
    return PatchResult(**(values | changes))


def test_verdicts() -> None:
    spread = float(np.std([-0.1, 0.0, 0.1, 0.0], ddof=1))
    assert result().ratio == pytest.approx(0.5 / spread)
    assert "raises" in result().verdict and "6.1 times" in result().verdict
    assert "lowers" in result(change=-0.5).verdict
    assert result(similar=0.6).verdict.endswith("resemblance alone explains it.")
    assert result(similar=-0.6).verdict.endswith("change it by -0.6.")
    assert result(change=0.1).verdict.startswith("No effect") and "more rows at once" in result(change=0.1).verdict
    weak = result(change=0.3)
    assert not weak.has_effect and weak.verdict.startswith("No clear effect")
    assert (
        "outside of what random rows do (-0.1 to +0.1; 3.7 times their spread, and would have to be 5)" in weak.verdict
    )
    # three spreads away, but within what random rows do
    assert not result(change=0.9, random=(1.0, *[0.0] * 30)).has_effect
    # random rows that change nothing at all: rounding is no effect
    assert not result(change=2e-6, random=(0.0,) * 4).has_effect
    assert result(change=1e-5, random=(0.0,) * 4).has_effect


def test_results_are_printed_and_plain(own: TrakAttributor, planted: Any) -> None:
    import json

    found = own.verify(planted[2], PLANTED, draws=4)
    plain = json.loads(json.dumps(found.to_dict()))
    assert plain["rows"] == PLANTED and plain["verdict"] == found.verdict and plain["has_effect"] is found.has_effect
    text = str(found)
    assert text.startswith(found.verdict) and "random rows" in text and "similar rows" in text
    assert own.verify(planted[2], PLANTED, draws=4) == found  # the same draws, the same bits
    assert verify_rows(own.features, planted[2], PLANTED, draws=4, seed=1).random != found.random
