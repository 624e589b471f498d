"""A question about a featurized model, and the answer to it."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from datasets import Dataset

from hf_trak.data.rows import RowPart
from hf_trak.methods import AnyMethod
from hf_trak.scores.groups import RowGroups
from hf_trak.scores.scored_dataset import ScoreBlock
from hf_trak.weights.checkpoints import Checkpoint


def targets_name(fingerprint: str) -> str:
    """Name the experiment of targets that nobody has named.

    Args:
        fingerprint: fingerprint of the targets.
    """
    return f"targets-{fingerprint[:12]}"


@dataclass(frozen=True)
class Question:
    """Targets that training rows are scored for. [`~FeaturizedModel.question`] makes it.

    Attributes:
        eval_dataset: the targets.
        name: name of the experiment, under which target features are kept.
        fingerprint: fingerprint of the targets.
        collation: what becomes of the targets on the way to the model.
        ids: the checkpoints to average over.
        sources: weights that are given for them, by id.
        groups: groups of targets that are scored by their mean; `None` to score each target.
        of_loss: whether minus the loss of targets is asked about, rather than the output of the task. Whole gradients
            answer that.
    """

    eval_dataset: Any
    name: str
    fingerprint: str
    collation: Mapping[str, Any]
    ids: list[int]
    sources: Mapping[int, Checkpoint | None]
    groups: RowGroups | None
    of_loss: bool = False

    @property
    def title(self) -> str:
        """Return the name that a person gave, or `targets`."""
        return "targets" if self.name == targets_name(self.fingerprint) else self.name

    @property
    def m(self) -> int:
        """Return the number of scores of each training row: of targets, or of groups of them."""
        return len(self.eval_dataset) if self.groups is None else len(self.groups)

    @property
    def tag(self) -> str | None:
        """Return a digest of the groups, or `None` without groups."""
        return None if self.groups is None else self.groups.tag

    @property
    def rows(self) -> Any:
        """Return the rows of a result: targets, or groups of them."""
        return self.eval_dataset if self.groups is None else self.groups.table()


@dataclass(frozen=True)
class Answer:
    """Scores for a question, as columns.

    Attributes:
        columns: score columns, one row for each row of the result.
        method: how the scores were computed.
        blocks: computes the scores again, of all training rows or of `rows`, in every process.
        rows: the training rows that were reranked; `None` for other methods, and where none are at hand.
    """

    columns: Dataset
    method: AnyMethod
    blocks: Callable[[], Iterator[ScoreBlock]]
    rows: RowPart | None = None
