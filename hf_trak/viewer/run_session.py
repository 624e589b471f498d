"""A saved run: its targets with the scores that it keeps, without the model and its features."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from hf_trak.report.content import Columns, content_of, stored
from hf_trak.report.page import facts_shown
from hf_trak.report.run import AttributionRun
from hf_trak.report.views import index_ranks
from hf_trak.scores.scored_dataset import RANK_COLUMNS, STAGE_COLUMN, TOP_K_COLUMNS
from hf_trak.viewer.session import Answer, Session
from hf_trak.viewer.train_rows import TrainRows


class RunSession(Session):
    """Shows the targets of a run that `hf-trak attribute` or `AttributionRun.save` has written."""

    def __init__(self, run: AttributionRun, title: str = "Which training rows did this?", roots: Sequence[Path] = ()):
        """
        Args:
            run (`AttributionRun`):
                Scores and rows.
            title (`str`, *optional*):
                Heading of the page.
            roots (`Sequence[Path]`, *optional*):
                Directories below which image files of rows may be read.
        """
        self.run = run
        self.title = title
        self.roots = list(roots)
        self.rows = TrainRows(run.train, run.n_train, run.train_rows)
        self._scored = stored(run.scored)
        self._columns = Columns.find(self._scored)

    def __len__(self) -> int:
        """Number of targets."""
        return len(self.run.scored)

    def facts(self) -> list[tuple[str, str]]:
        return facts_shown(self.run.facts)

    def self_influence(self) -> np.ndarray | None:
        return self.run.self_influence

    def answer(self, target: int) -> Answer:
        """Read the scores of a target.

        Args:
            target: its row in the run.

        Raises:
            ValueError: there is no such target.
        """
        if not 0 <= target < len(self):
            raise ValueError(f"The target is {target}. Expected a number from 0 to {len(self) - 1}. Choose one.")
        row = self._scored[target]
        found, ranks = dict[int, float](), dict[int, str]()
        for place in (0, 2):
            found |= dict(zip(row[TOP_K_COLUMNS[place]], row[TOP_K_COLUMNS[place + 1]], strict=True))
            ranks |= index_ranks(row, TOP_K_COLUMNS[place], RANK_COLUMNS[place // 2])
        numbers = np.array(sorted(found), dtype=np.int64)
        scores = np.array([found[number] for number in numbers.tolist()], dtype=np.float32)
        whole = len(numbers) == self.rows.count
        note = "" if whole else f"The run keeps {len(numbers):,} of {self.rows.count:,} scores of this target."
        stage = row.get(STAGE_COLUMN)
        content = content_of(row, self._columns)
        return Answer(content, numbers, scores, str(stage or "index"), whole, ranks, note)
