"""Rows are known by their number, and errors of data loader workers reach the user.

Rows keyed by their text would collapse duplicates. An exception in another process that nobody reads would leave
nothing on disk behind a run that seems to have gone well.
"""

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from datasets import Dataset
from store_jobs import TinyNet, feature_digests
from store_jobs import rows as pixel_rows
from torch import Tensor, nn
from trak_options import relative_ridge

from hf_trak import TrakAttributor, TrakConfig
from hf_trak.errors import IncompleteStoreError

TEXTS = ["a b", "c d e", "a b", "b b a", "a b", "c d e", "a b", "e", "d a", "a b"]
LABELS = [0, 1, 0, 2, 1, 1, 0, 2, 0, 0]
TWINS, SAME_TEXT = [0, 2, 6, 9], 4
"""Rows of one text and one label, and a row of that text with another label."""
RIDGE = 0.02


class Bag(nn.Module):
    """The mean of word vectors, and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(6, 4, padding_idx=0)
        self.head = nn.Linear(4, 3)

    def forward(self, input_ids: Tensor) -> Tensor:
        known = (input_ids != 0).sum(1, keepdim=True)
        return self.head(torch.tanh(self.words(input_ids).sum(1) / known))


def word_ids(text: str) -> list[int]:
    ids = [1 + ord(word) - ord("a") for word in text.split()]
    return ids + [0] * (3 - len(ids))


def text_rows(texts: list[str], labels: list[int]) -> Dataset:
    return Dataset.from_dict({"text": texts, "input_ids": [word_ids(text) for text in texts], "labels": labels})


def margins(logits: Tensor, labels: Tensor) -> Tensor:
    true = logits.gather(1, labels[:, None]).squeeze(1)
    return true - logits.scatter(1, labels[:, None], -torch.inf).logsumexp(1)


def closed_form(model: nn.Module, train: Dataset, targets: Dataset) -> Tensor:
    """TRAK at identity projection in float64, `(targets, rows)`: every row counts by itself, whatever its text."""

    def gradients(dataset: Dataset) -> tuple[Tensor, Tensor]:
        ids, labels = torch.tensor(dataset["input_ids"][:]), torch.tensor(dataset["labels"][:])
        rows = []
        for i in range(len(ids)):
            f = margins(model(ids[i : i + 1]), labels[i : i + 1])
            rows.append(torch.cat([g.flatten() for g in torch.autograd.grad(f.sum(), list(model.parameters()))]))
        with torch.no_grad():
            q = torch.sigmoid(-margins(model(ids), labels))
        return torch.stack(rows).double(), q.double()

    x, q = gradients(train)
    t, _ = gradients(targets)
    inverse = torch.linalg.inv(x.T @ x + RIDGE * torch.eye(x.shape[1], dtype=torch.float64))
    return t @ inverse @ x.T * q


def test_identical_texts_keep_rows_and_scores_of_their_own(tmp_path: Any) -> None:
    """Ten rows, five of them of one text; two equal targets."""
    torch.manual_seed(1)
    model, train = Bag(), text_rows(TEXTS, LABELS)
    targets = text_rows(["a b", "e d", "a b"], [0, 2, 0])
    args = TrakConfig(
        str(tmp_path), proj_type="none", per_device_batch_size=3, shard_size=4, use_cpu=True, budget="fast"
    )
    attributor = TrakAttributor(model, args, train_dataset=train, task="text_classification").featurize()
    attributor.features.args = replace(args, lambda_relative=relative_ridge(attributor, RIDGE))
    expected = closed_form(model, train, targets)
    scored = attributor.attribute(targets, top_k=None)
    scores = torch.tensor(scored["trak_scores"][:], dtype=torch.float64)
    assert scores.shape == (3, len(TEXTS))
    torch.testing.assert_close(scores, expected, rtol=1e-3, atol=1e-5 * float(expected.abs().max()))
    for target in (0, 2):
        assert len(set(scores[target, TWINS].tolist())) == 1 and float(scores[target, 0]) > 0
        assert float(scores[target, SAME_TEXT]) < 0  # the same text under another label spoils the target
    assert torch.equal(scores[0], scores[2])
    alone = TrakAttributor(
        model,
        replace(args, output_dir=str(tmp_path / "once")),
        train_dataset=train.select([i for i in range(len(TEXTS)) if i not in TWINS[1:]]),
        task="text_classification",
    ).featurize()
    once = torch.tensor(alone.attribute(targets, top_k=None)["trak_scores"][:], dtype=torch.float64)
    assert float(once[0, 0]) > 1.5 * float(scores[0, 0])  # four copies share what one has alone
    top = attributor.attribute(targets, top_k=len(TEXTS))
    for helpers, harmful in zip(top["trak_indices"][:], top["trak_harmful_indices"][:], strict=True):
        assert sorted(helpers) == sorted(harmful) == list(range(len(TEXTS)))
    assert set(top[0]["trak_indices"][: len(TWINS)]) == set(TWINS)
    assert len(attributor.self_influence()) == len(TEXTS)


# -- exceptions in other processes -----------------------------------------------------------------------------------


class UnreadableError(OSError):
    """What a decoder raises."""


class Rows(torch.utils.data.Dataset):
    """Rows of pixels. One does something else in whichever process reads it."""

    fingerprint = "pixels"

    def __init__(self, bad: int | None, act: Callable[[], None] | None = None) -> None:
        self.rows, self.bad, self.act = pixel_rows(23, 1), bad, act

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index == self.bad and self.act is not None and torch.utils.data.get_worker_info() is not None:
            self.act()
        return self.rows[index]


def unreadable() -> None:
    raise UnreadableError("row 13 is damaged")


def die() -> None:
    os._exit(0)  # a status that would pass for success


def attributor_of(directory: Any, dataset: Any, workers: int = 2) -> TrakAttributor:
    torch.manual_seed(5)
    args = TrakConfig(
        str(directory), proj_dim=16, shard_size=4, per_device_batch_size=3, use_cpu=True, budget="fast",
    )  # fmt: skip
    made = TrakAttributor(TinyNet(), args, train_dataset=dataset, task="image_classification")
    made.features.num_workers = workers
    return made


@pytest.mark.slow
@pytest.mark.parametrize(
    ("act", "error", "message"),
    [(unreadable, UnreadableError, "row 13 is damaged"), (die, (RuntimeError, OSError, EOFError), "")],
    ids=["an exception", "a worker that ends"],
)
def test_what_goes_wrong_in_a_dataloader_worker_reaches_the_user(
    act: Callable[[], None], error: Any, message: str, tmp_path: Any
) -> None:
    """The call fails with the worker's error; shards before it are kept, none after it exists, and nothing
    can be attributed until the rest has been computed."""
    attributor = attributor_of(tmp_path / "store", Rows(13, act))
    with pytest.raises(error, match=message) as info:
        attributor.featurize()
    if error is UnreadableError:
        assert "in unreadable" in str(info.value)  # the worker's own traceback
    done = [index for index in range(6) if attributor.features.store.train(0).is_written(index)]
    # a worker that dies may take batches with it that it has not yet handed over
    assert done == [0, 1, 2] if error is UnreadableError else done == [0, 1, 2][: len(done)]
    with pytest.raises(IncompleteStoreError, match=f"{6 - len(done)} shards of model_id 0 are missing"):
        attributor.attribute(pixel_rows(2, 2))
    again = attributor_of(tmp_path / "store", Rows(None)).featurize()
    whole = attributor_of(tmp_path / "whole", Rows(None), workers=0).featurize()
    for one in (again, whole):
        one.attribute(pixel_rows(2, 2))
    assert feature_digests(tmp_path / "store") == feature_digests(tmp_path / "whole")
