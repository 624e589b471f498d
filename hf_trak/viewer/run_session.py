"""A saved run: its targets with the scores that it keeps, without the model and its features."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from hf_trak.report.content import Columns, content_of, stored
from hf_trak.report.page import facts_shown
from hf_trak.report.run import AttributionRun
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
        self._columns = Columns.find(self._scored, text_columns=run.text_columns(self._scored))

    def __len__(self) -> int:
        """Return the number of targets."""
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
        found = Answer.of_lists(row, content_of(row, self._columns), self.rows.count)
        if found.whole:
            return found
        note = f"The run keeps {len(found.rows):,} of {self.rows.count:,} scores of this target."
        return replace(found, note=note)
