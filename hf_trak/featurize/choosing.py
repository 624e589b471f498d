"""The choice of `method="auto"`, the best that is at hand and within the budget, and what `recommend` says of it.

In this order: a replay of the recorded run; what calibration has judged; what the banks say of models like this one.
`bank_figures.json`, which `benchmarks/which_method.py` collects, has the linear datamodeling scores of the banks.
"""

import json
import logging
import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from typing import Any, get_args
from weakref import WeakKeyDictionary

import numpy as np

from hf_trak.config import HESSIAN_SHARE, BudgetName
from hf_trak.data.rows import row_count
from hf_trak.errors import HfTrakError, StoreError
from hf_trak.featurize.answering import planned
from hf_trak.featurize.calibrating import possible, read_calibration
from hf_trak.featurize.calibration import Calibration, named
from hf_trak.featurize.featurized import FeaturizedModel
from hf_trak.featurize.fit_batches import shortages
from hf_trak.featurize.pricing import Price, fitted, price, recorded_run
from hf_trak.featurize.question import Question
from hf_trak.featurize.run_replaying import RunReplay
from hf_trak.methods import AnyMethod, Combination, Exact, Index, Replay, Rerank
from hf_trak.modelout_functions.aggregated import AggregatedModelOutput
from hf_trak.runtime.checks import byte_size
from hf_trak.runtime.progress import duration, say

logger = logging.getLogger(__name__)

MEASURED = 1
"""Seconds from which on, by the rate of featurizing, a step of a run is measured: a pass over many rows is faster."""

MINUTE = 60.0

_FEW = 10.0
"""Seconds below which files and checks of engines, which have no price, may take as long as the passes."""

_BANKS = "LDS of models like this one on the banks"

GAIN = 0.02
"""Difference of two figures of banks below which methods are as good as each other."""

_told = WeakKeyDictionary[FeaturizedModel, AnyMethod]()
"""What was chosen for a model the last time, which its user knows, and what would be better."""

_doubted = WeakKeyDictionary[FeaturizedModel, dict[str, float]]()
"""By form of the curvature, the part of the rows in that of a replay that failed or had signs of wrong scores."""


@dataclass(frozen=True)
class Option:
    """A method that is at hand.

    Attributes:
        method: the method.
        price: its price beside the index.
        quality: its expected linear datamodeling score, or its correlation with replayed targets.
        why: where that comes from.
        of_banks: whether it comes from the banks, whose small differences say nothing.
        seconds: what it takes beside the index, where that was measured.
    """

    method: AnyMethod
    price: Price
    quality: float
    why: str
    of_banks: bool
    seconds: float | None = None

    def text(self, rate: float | None, featurizing: int) -> str:
        """Say method, quality and time.

        Args:
            rate: rows per second; `None` if it was not measured.
            featurizing: row passes that featurizing takes.
        """
        return f"{named(self.method)} ({self.why}; {self.time(rate, featurizing)})"

    def lasts(self, rate: float | None) -> float | None:
        """Return the seconds that it takes beside the index, measured or by the rate; `None` if neither is known."""
        if self.seconds is not None or rate is None:
            return self.seconds
        return self.price.passes / rate + self.price.seconds

    def time(self, rate: float | None, featurizing: int) -> str:
        """Say the time that it takes beside the index."""
        if self.price.passes == 0:
            return "no time beside the index"
        # conjugate gradients may end before the steps that are paid for, and many targets share a pass
        about = "at most about" if _is_refined(self.method) else "about"
        if (seconds := self.lasts(rate)) is not None:
            return "a few seconds" if seconds < _FEW else f"{about} {duration(seconds)}"
        return f"{about} {self.price.passes / featurizing:.2g} times as long as featurizing"


@dataclass(frozen=True)
class Options:
    """What there is to choose from, best first, the index last.

    Attributes:
        options: the methods.
        rate: rows that are featurized per second; `None` if it was not measured.
        featurizing: row passes that featurizing takes in each process.
    """

    options: tuple[Option, ...]
    rate: float | None
    featurizing: int

    def within(self, budget: BudgetName) -> Option:
        """Return the best method that a budget allows: of those as good as it, by the banks, the cheapest."""
        within = [one for one in self.options if self._allows(one, budget)]
        near = [one for one in within if one.of_banks and one.quality >= within[0].quality - GAIN - 1e-9]
        return min(near, key=lambda one: one.price.passes) if within[0].of_banks else within[0]

    def _allows(self, one: Option, budget: BudgetName) -> bool:
        """Tell whether a method takes no time beside the index, or, by `"balanced"`, as long as featurizing at most.

        A minute is always allowed by `"balanced"`.
        """
        if budget == "best" or one.price.passes == 0:
            return True
        if budget == "fast":
            return False
        if (seconds := one.lasts(self.rate)) is None or self.rate is None:
            return one.price.passes <= self.featurizing
        return seconds <= max(self.featurizing / self.rate, MINUTE)

    def line(self, chosen: Option, budget: BudgetName) -> str:
        """Say what was chosen, why, and what would be better at which price."""
        text = f"`method='auto'` takes {chosen.text(self.rate, self.featurizing)}, `budget` is {budget!r}."
        best = self.options[0]
        as_good = best.of_banks and best.quality - chosen.quality <= GAIN + 1e-9
        if best.method == chosen.method or as_good:
            return text
        return f"{text} Better: {best.text(self.rate, self.featurizing)}."


def choose(
    model: FeaturizedModel,
    question: Question,
    of_replay: Callable[[], Question],
    top_k: int | None,
    per_token: bool = False,
) -> tuple[AnyMethod, Question]:
    """Choose the method of `"auto"`, and say so. All processes call this together.

    A replay is computed here, and left alone if it fails or there are signs that its scores are wrong.

    Args:
        model: the featurized model.
        question: the targets.
        of_replay: asks a replay about them.
        top_k: rows to return for each target, where no other scores are needed.
        per_token: whether scores are broken down into parts that add up, which those of refined targets do not, since
            conjugate gradients end at a tolerance.

    Returns:
        The method, and the question to ask by it.

    Raises:
        StoreError: a calibration or a record is damaged.
    """
    budget = model.args.budget
    calibration = read_calibration(model, question.ids)
    if budget == "fast" and model in _told:
        return (Index() if calibration is None else calibration.index), question
    found = options(model, question.m, question.ids, top_k, calibration, measure=budget != "fast")
    if per_token:
        found = replace(found, options=tuple(one for one in found.options if not _is_refined(one.method)))
    while True:
        chosen = found.within(budget)
        if model.processes.is_main_process:
            if (chosen.lasts(found.rate) or 0) > MINUTE:
                logger.warning("%s", found.line(chosen, budget))
            elif _told.get(model) != chosen.method:
                say(logger, found.line(chosen, budget))
        _told[model] = chosen.method
        if not isinstance(chosen.method, Replay):
            return chosen.method, question
        asked = of_replay()
        if (doubts := doubt(model, asked, chosen.method)) is None:
            return chosen.method, asked
        model.warn_once(f"`method='auto'` leaves {named(chosen.method)} alone: {doubts}")
        leave_alone(model, chosen.method)
        left = [one for one in found.options if not isinstance(one.method, Replay) or _is_believed(model, one.method)]
        found = replace(found, options=tuple(left))


def doubt(model: FeaturizedModel, question: Question, method: Replay) -> str | None:
    """Replay, and say what speaks against the scores, if anything does. With several processes errors are raised.

    Args:
        model: the featurized model.
        question: what is asked.
        method: the replay.
    """
    try:
        return " ".join(planned(model, question, method).warnings) or None
    except HfTrakError as error:
        if isinstance(error, StoreError) or model.processes.num_processes > 1:
            raise
        return str(error)


def leave_alone(model: FeaturizedModel, method: Replay) -> None:
    """Let `"auto"` take no replay of so many rows, or fewer, by the same form of the curvature from now on.

    Args:
        model: the featurized model.
        method: the replay that failed, or had signs that its scores are wrong.
    """
    shares = _doubted.setdefault(model, {})
    shares[method.products] = max(shares.get(method.products, 0.0), method.hessian_share)


def _is_believed(model: FeaturizedModel, method: Replay) -> bool:
    """Tell whether no replay of as many rows has failed."""
    return method.hessian_share > _doubted.get(model, {}).get(method.products, 0.0)


def _is_refined(method: AnyMethod) -> bool:
    parts = method.methods if isinstance(method, Combination) else (method,)
    return any(isinstance(one, Exact | Rerank) and one.refine is not None for one in parts)


def options(
    model: FeaturizedModel,
    m: int,
    checkpoints: Sequence[int],
    top_k: int | None,
    calibration: Calibration | None,
    measure: bool,
) -> Options:
    """List the methods that are at hand, best first.

    Args:
        model: the featurized model.
        m: number of targets.
        checkpoints: ids of the checkpoints to average over.
        top_k: as for [`choose`].
        calibration: the calibration, if there is one.
        measure: whether to measure the time of a row, on the first batches.
    """
    ids, methods = list(checkpoints), list[tuple[AnyMethod, float, str]]()
    rows = model.train_dataset
    absent = getattr(rows, "absent", False) or getattr(rows, "remote", False)
    at_hand = not absent and model.scored_by is None  # engines read the index alone
    if at_hand and (run := recorded_run(model)) is not None:
        half, convex = replace(run, hessian_share=HESSIAN_SHARE), replace(run, form="gauss-newton")
        runs = [
            (run, 1.0, "the recorded run itself"),
            (half, 0.9, "the recorded run, half of its curvature"),
            (convex, 0.8, "the recorded run, by the Gauss-Newton matrix"),
        ]
        methods += [one for one in runs if _is_believed(model, one[0])]
    if calibration is None:
        ranked = sorted(_of_banks(model, top_k, ids), key=lambda one: -one[1]) if at_hand else []
        methods += [*ranked, _of_bank(model, Index())]
    else:
        judged = [calibration.chosen, *calibration.candidates]
        means = [float(np.mean(one.sums)) for one in judged]
        why = f"correlation with {len(calibration.chosen.sums)} replayed targets"
        found = [(one.method, mean, f"{why} {mean:.2f}") for one, mean in zip(judged, means, strict=True)]
        index = next(place for place, one in enumerate(found) if one[0] == calibration.index)
        methods += [one for one in found[: index + 1] if at_hand or isinstance(one[0], Index)]
    rate = model.rate() if measure and len(methods) > 1 and at_hand else None
    featurizing = -(-model.train_size * len(ids) // model.processes.num_processes)
    listed, steps = list[Option](), list[tuple[float, float] | None]()
    for method, quality, why in methods:
        try:
            priced, seconds = price(model, method, m, ids), None
        except HfTrakError as error:
            if isinstance(error, StoreError) or not isinstance(method, Replay):
                raise
            model.warn_once(f"`method='auto'` leaves {named(method)} alone: {error}")
            continue
        if isinstance(method, Replay) and rate is not None and priced.passes > MEASURED * rate:
            steps = steps or [_measured_step(model, method, m, ids[-1])]  # of the first, for all
            seconds = None if steps[0] is None else RunReplay(model, method).seconds(m, steps[0])
        listed.append(Option(method, priced, quality, why, why.startswith(_BANKS), seconds))
    return Options(tuple(listed), rate, featurizing)


def seconds_of(
    model: FeaturizedModel, method: AnyMethod, m: int, checkpoints: Sequence[int], fit: bool = True
) -> float | None:
    """Return the seconds that a method takes beside the index. All processes call this together.

    Args:
        model: the featurized model.
        method: the method.
        m: number of targets.
        checkpoints: ids of the checkpoints to average over.
        fit: whether to count a curvature that is not fitted yet.

    Returns:
        Seconds by a measured step, if a run is replayed, and otherwise by the rate of featurizing; `None` with too few
        rows to measure that.
    """
    if isinstance(method, Replay) and method.of == "run":
        step = _measured_step(model, method, m, checkpoints[-1])
        if step is not None:
            return RunReplay(model, method).seconds(m, step)
    if (rate := model.rate()) is None:
        return None
    priced = price(model, method, m, list(checkpoints), fit)
    return priced.passes / rate + priced.seconds


def _measured_step(model: FeaturizedModel, method: Replay, m: int, model_id: int) -> tuple[float, float] | None:
    """Measure a step of a run, in the slowest process; return `None` if it cannot be replayed, which is said later."""
    own = math.nan, math.nan
    with suppress(HfTrakError, RuntimeError, ValueError):  # also of a loss, or of memory
        own = RunReplay(model, method).step_seconds(m, model_id)
    every = model.processes.gather(own)
    if any(math.isnan(one) for one, _ in every):
        return None
    return max(one for one, _ in every), max(one for _, one in every)


def _of_banks(model: FeaturizedModel, top_k: int | None, checkpoints: list[int]) -> list[tuple[AnyMethod, float, str]]:
    """Return the methods with whole gradients that are better than the index on models like this one.

    There are none where the configuration has another curvature than theirs, a fitted one has other settings, or it
    has to be fitted first, and memory or disk are too small for it.
    """
    methods: list[Exact | Rerank] = [Exact("hybrid"), Exact("ekfac"), Exact("ekfac", "cg")]
    if top_k is not None and "draws" not in model.store.config.get("collation", {}):
        methods.append(Rerank(max(Rerank.rows, top_k), "ekfac"))
    index = _of_bank(model, Index())[1]
    found = [_of_bank(model, one) for one in methods if possible(model, one)]
    better = [one for one in found if one[1] > index]

    def at_hand() -> bool:
        if model.args.curvature.fitted_kind != "ekfac":
            return False
        there = fitted(model, Exact("ekfac"), checkpoints)
        return there is not None and (there or not shortages(model))

    open_to_all = bool(better) and model.processes.broadcast_from_main(at_hand)
    return better if open_to_all else []


def _of_bank(model: FeaturizedModel, method: AnyMethod) -> tuple[AnyMethod, float, str]:
    """Return a method with the mean of its figures on models like this one."""
    values = of_banks(method, kind_of(model))
    if not values:
        return method, -1.0, f"{_BANKS}: not measured"
    return method, float(np.mean(values)), f"{_BANKS} {figures_text(values)}"


def figures_text(values: Sequence[float]) -> str:
    """Return the mean of figures and their range, as `.48 (.21 to .82)`."""
    short = [f"{one:.2f}".removeprefix("0") for one in (float(np.mean(values)), min(values), max(values))]
    return short[0] if len(values) == 1 else f"{short[0]} ({short[1]} to {short[2]})"


def kind_of(model: FeaturizedModel) -> str:
    """Return the kind of a model: `"adapters"`, `"tokens"` (several labels per row) or `"labels"`."""
    if any("lora_" in name for name in model.layout.names):
        return "adapters"
    return "tokens" if isinstance(model.task, AggregatedModelOutput) else "labels"


def of_banks(method: AnyMethod, kind: str) -> list[float]:
    """Return the linear datamodeling scores of a method on the banks of one kind. Reranking has those of EK-FAC."""
    name = "index"
    if isinstance(method, Exact | Rerank):
        name = "exact, hybrid" if method.curvature == "hybrid" else "exact, EK-FAC"
        name = name if method.refine is None else "exact, refined"
    banks = bank_figures().values()
    return [one["lds"][name] for one in banks if one["kind"] == kind and name in one["lds"]]


@cache
def bank_figures() -> dict[str, Any]:
    """Read what methods are worth on the banks."""
    found: dict[str, Any] = json.loads(files("hf_trak.featurize").joinpath("bank_figures.json").read_text("utf-8"))
    return found


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
        targets (`int`): number of targets.
        rows (`tuple[Recommended, ...]`): fast, balanced and best.
        note (`str`): what else would help; empty if nothing is known.
    """

    targets: int
    rows: tuple[Recommended, ...]
    note: str

    def __str__(self) -> str:
        return "\n".join(self.lines(lambda one: one.call))

    def lines(self, call: Callable[[Recommended], str]) -> list[str]:
        """List the lines of the table, with what to copy for each budget."""
        found = [f"For {self.targets:,} target{'' if self.targets == 1 else 's'}:"]
        for one in self.rows:
            disk = f", {byte_size(one.disk)}" if one.disk else ""
            found += [f"{one.budget}: {one.time}{disk}. {one.quality}.", f"    {call(one)}"]
        return [*found, self.note] if self.note else found


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
    rows = []
    for budget in get_args(BudgetName):
        one = found.within(budget)
        time = one.time(found.rate, found.featurizing)
        rows.append(Recommended(budget, named(one.method), time, one.price.disk, one.why))
    recorded = isinstance(found.options[0].method, Replay)
    notes = []
    if model.trainer is not None and not recorded:
        notes.append(_RECORD)
    if calibration is None and recorded:
        notes.append(_CALIBRATE)
    return Recommendation(m, tuple(rows), " ".join(notes))


_RECORD = "Recorded with `TrakCallback(record=True)`, the run itself can be replayed."

_CALIBRATE = "`calibrate(eval_dataset)` measures the methods on this model."
