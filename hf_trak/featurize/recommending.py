"""`attributor.recommend`: three rows (fast, balanced, best) with time, disk, expected quality, and the call."""

from dataclasses import dataclass
from typing import Any

from hf_trak.config import BudgetName
from hf_trak.data.rows import row_count
from hf_trak.featurize.calibrating import read_calibration
from hf_trak.featurize.calibration import named
from hf_trak.featurize.choosing import Option, Options, options
from hf_trak.featurize.featurized import FeaturizedModel
from hf_trak.methods import Replay
from hf_trak.runtime.checks import byte_size

_BUDGETS: tuple[BudgetName, ...] = ("fast", "balanced", "best")


@dataclass(frozen=True)
class Recommended:
    """A method for one budget.

    Attributes:
        budget (`str`): `"fast"`, `"balanced"` or `"best"`.
        method (`str`): the method, as the code that makes it.
        time (`str`): what it takes beside the index.
        disk (`int`): bytes that it keeps beside the index.
        quality (`str`): what is expected of it, and where that comes from.
    """

    budget: BudgetName
    method: str
    time: str
    disk: int
    quality: str

    @property
    def call(self) -> str:
        """Return the call to copy."""
        if " · " in self.method:  # a sum of methods, which calibration has found
            return f'TrakConfig(..., budget="{self.budget}"); attribute(eval_dataset)'
        return f"attribute(eval_dataset, method={self.method})"


@dataclass(frozen=True)
class Recommendation:
    """What to take for each budget. `str()` is a table.

    Attributes:
        rows (`tuple[Recommended, ...]`): fast, balanced and best.
        note (`str`): what else would help; empty if nothing is known.
    """

    rows: tuple[Recommended, ...]
    note: str

    def __str__(self) -> str:
        lines = []
        for one in self.rows:
            disk = f", {byte_size(one.disk)}" if one.disk else ""
            lines.append(f"{one.budget}: {one.time}{disk}. {one.quality}.\n    {one.call}")
        return "\n".join([*lines, self.note] if self.note else lines)


def recommend(model: FeaturizedModel, eval_dataset: Any) -> Recommendation:
    """Recommend a method for each budget, see [`~hf_trak.TrakAttributor.recommend`].

    Args:
        model: the featurized model.
        eval_dataset: the targets, or their number.

    Raises:
        As there.
    """
    m = eval_dataset if isinstance(eval_dataset, int) else row_count(eval_dataset, "eval_dataset")
    model.processes.broadcast_from_main(model.prepare_store)
    ids = model.chosen(None)[0]
    calibration = read_calibration(model, ids)
    found = options(model, m, ids, 20, calibration, measure=True)
    rows = tuple(_row(found, found.within(budget), budget) for budget in _BUDGETS)
    recorded = isinstance(found.options[0].method, Replay)
    notes = []
    if model.trainer is not None and not recorded:
        notes.append(_RECORD)
    if calibration is None and recorded:
        notes.append(_CALIBRATE)
    return Recommendation(rows, " ".join(notes))


_RECORD = "Recorded with `TrakCallback(record=True)`, the run itself can be replayed."

_CALIBRATE = "`calibrate(eval_dataset)` measures the methods on this model."


def _row(found: Options, chosen: Option, budget: BudgetName) -> Recommended:
    return Recommended(
        budget, named(chosen.method), chosen.time(found.rate, found.featurizing), chosen.price.disk, chosen.why
    )
