"""From rows to their features, for one set of weights: batches, engine, projection, and means over draws."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.utils.generic import find_labels

from hf_trak.config import TrakConfig
from hf_trak.curvature.maps import GradientMap, MapSink
from hf_trak.data.rows import RowBatches, batch_rows
from hf_trak.errors import NonFiniteError
from hf_trak.gradient_computers import AbstractGradientComputer, AutoGradientComputer, make_gradient_computer
from hf_trak.gradient_computers.base import SplitBatch
from hf_trak.gradient_computers.environment import pass_settings
from hf_trak.gradient_computers.sharded import ShardedGradientComputer
from hf_trak.modelout_functions import AbstractModelOutput
from hf_trak.modelout_functions.aggregated import targets_may_be_empty
from hf_trak.modelout_functions.base import FieldBatch, Side
from hf_trak.modelout_functions.batches import LABEL_NAMES
from hf_trak.projectors import BlockProjector, ProjectionSink
from hf_trak.runtime.lockstep import Lockstep
from hf_trak.runtime.processes import Processes
from hf_trak.runtime.sharding import is_sharded
from hf_trak.store.references import read_references, write_references
from hf_trak.store.store import FeatureStore


class DrawMean:
    """The mean over D draws of the features of some rows.

    What is attributed is the expected loss over draws. Its gradient, with the opposite sign, is the mean of q_d ∇f_d.
    So training rows have

        q = (1/D) Σ_d |q_d|        x = (1/D) Σ_d q_d x_d / q

    with q x the mean of q_d x_d, and targets t = (1/D) Σ_d t_d, which belongs to the expected output. For rows with
    q = 0 in all draws, x is the plain mean. One draw is left as it is.
    """

    def __init__(self, side: Side) -> None:
        """
        Args:
            side: whether rows are training examples or targets.
        """
        self._side = side
        self._features: list[Tensor] = []
        self._weights: list[Tensor] = []

    def add(self, features: Tensor, out_to_loss: Tensor) -> None:
        """Add one draw.

        Args:
            features: x_d or t_d, `(B, k)`.
            out_to_loss: q_d, `(B,)`.
        """
        if not self._features:
            self._features, self._weights = [features], [out_to_loss]
            return
        if len(self._weights) == 1:
            self._features = [self._weighted(self._features[0], self._weights[0]), self._features[0].clone()]
        self._features[0] += self._weighted(features, out_to_loss)
        self._features[1] += features
        self._weights.append(out_to_loss)

    def result(self) -> tuple[Tensor, Tensor]:
        """Return features `(B, k)` and q `(B,)`."""
        count = len(self._weights)
        if count == 1:
            return self._features[0], self._weights[0]
        weights = torch.stack(self._weights)
        plain = self._features[1] / count
        if self._side == "target":
            return plain, weights.mean(dim=0)
        q = weights.abs().mean(dim=0)
        some = q > 0
        weighted = self._features[0] / (count * torch.where(some, q, 1.0)).unsqueeze(1)
        return torch.where(some.unsqueeze(1), weighted, plain), q

    def _weighted(self, features: Tensor, out_to_loss: Tensor) -> Tensor:
        return features * out_to_loss.unsqueeze(1)


class LateChecks:
    """Chooses the batches before which the engine is checked again: a late one, and the last of several rows.

    Rows may mix in some batches alone, such as those that fill an expert to its capacity.

    Attributes:
        rows: the batch that is checked again now; empty for other batches.
    """

    def __init__(self, count: int) -> None:
        """
        Args:
            count: number of rows that are to come.
        """
        self.rows: Sequence[int] = ()
        self._left = count
        self._late = count // 4

    def meet(self, rows: Sequence[int]) -> bool:
        """Take note of the next batch, and tell whether it is one of them."""
        self._left -= len(rows)
        chosen = len(rows) > 1 and self._left < max(self._late, 2)
        self.rows = rows if chosen else ()
        self._late = 0 if chosen else self._late
        return chosen


@dataclass(eq=False, repr=False)
class RowFeatures:
    """Compute projected per-sample gradients of rows with a model as it is now.

    Attributes:
        model: in eval mode, with the weights of the checkpoint.
        task: the model output function.
        projector: R, of size P × k, or another linear map of gradients.
        rows: collates rows of a dataset, on one side, as the model and a task get them.
        train_dataset: the training rows, from which a task may take references (CLIP: simulated negatives).
        args: the configuration.
        processes: the processes among which shards are divided.
        device: where batches go.
        store: where a task's references are kept beside the features.
        lockstep: keeps processes that hold a sharded model at the same pass.
        batch_done: called with the number of rows after every batch.
    """

    model: torch.nn.Module
    task: AbstractModelOutput
    projector: BlockProjector | GradientMap
    rows: Callable[[Any, Side, AbstractModelOutput], RowBatches]
    train_dataset: Any
    args: TrakConfig
    processes: Processes
    device: torch.device
    store: FeatureStore
    lockstep: Lockstep
    batch_done: Callable[[int], None]

    def __post_init__(self) -> None:
        self.division = self.lockstep.division
        self.sharded = is_sharded(self.model)

    def computer(self) -> AutoGradientComputer | ShardedGradientComputer:
        """Make the engine that the configuration asks for.

        Raises:
            ValueError: it asks for one that does not work on a model that is divided over processes.
        """
        options: dict[str, Any] = {"device": self.device, "grad_wrt": self.args.grad_wrt}
        if self.sharded:
            if self.args.engine not in ("auto", "hooked"):
                raise ValueError(
                    f"`engine` is {self.args.engine!r}, for a model that is divided over processes. Expected 'auto' "
                    "or 'hooked', since other engines need all parameters at once."
                )
            made = ShardedGradientComputer(self.model, self.task, self.lockstep, **options)
            made.gathers = isinstance(self.projector, GradientMap) and self.projector.by_owner
            return made
        return make_gradient_computer(self.args.engine, self.model, self.task, **options)

    def batches(self, dataset: Any, side: Side = "train") -> RowBatches:
        """Collate rows of a dataset, on one side, as the model and the task get them."""
        return self.rows(dataset, side, self.task)

    def prepare_task(self, model_id: int, batch_size: int) -> None:
        """Give the task what it has to know about this checkpoint (CLIP: simulated negatives).

        It is computed once and kept in the store, so that every process and every run, for training rows and for
        targets, uses the same bits.
        """
        self.task.bind(self.model)
        references = read_references(self.store, model_id)
        if references is None:
            rows = self.task.reference_rows(len(self.train_dataset))
            if not rows:
                return
            if self.sharded:  # decided before one of them writes
                self.processes.wait_for_everyone()
            cuts = [[rows[i] for i in cut] for cut in batch_rows(0, len(rows), batch_size)]
            with pass_settings(self.model):
                self.task.prepare(self.model, (batch for _, batch in self.batches(self.train_dataset).iterate(cuts)))
            if self.processes.is_main_process or not self.sharded:
                write_references(self.store, model_id, self.task.references())
            if self.sharded:
                self.processes.wait_for_everyone()
            references = read_references(self.store, model_id)
        if references is not None:
            self.task.restore(self.model, references)

    def _next(
        self,
        stream: Iterator[tuple[list[int], Any]],
        batches: RowBatches,
        computer: AutoGradientComputer | ShardedGradientComputer,
        model_id: int,
        side: Side,
        late: LateChecks | None = None,
    ) -> tuple[list[int], Tensor, Tensor]:
        """Return the next rows of a stream, their features `(B, k)` and q `(B,)`: means over their draws."""
        mean, rows = DrawMean(side), list[int]()
        for draw in range(batches.draws):
            rows, batch = next(stream)
            if draw == 0 and late is not None and late.meet(rows):
                computer.check_again()
            self.let_collate_alone(computer, batches, rows, batch, draw=draw)
            with targets_may_be_empty(batches.draws > 1):
                mean.add(*self.features_of(rows, batch, computer, model_id, side))
        features, q = mean.result()
        if batches.draws > 1 and side == "target" and bool((q == 0).any()):
            raise ValueError(
                f"The target row {rows[int((q == 0).nonzero()[0])]} has no label in any of {batches.draws} draws. "
                "Expected at least one. Is there a token in it that may be masked? Raise `num_draws`."
            )
        return rows, features, q

    def features_of(
        self, rows: Sequence[int], batch: Any, computer: AbstractGradientComputer, model_id: int, side: Side
    ) -> tuple[Tensor, Tensor]:
        """Return projected gradients `(B, k)`, scaled to preserve inner products, and q `(B,)`, both on the CPU.

        Args:
            rows: the numbers of the batch's rows.
            batch: the batch.
            computer: the engine.
            model_id: the checkpoint.
            side: whether rows are training examples or targets.

        Raises:
            NonFiniteError: a gradient is NaN or infinite; names the row.
        """
        if isinstance(self.projector, GradientMap):
            self.projector.begin(rows)
        sink = _SamplePerRow(lambda: self.projector.sink(len(rows), model_id, self.device), len(rows))
        batch = self.in_dtype_of_model(batch)
        try:
            outputs = computer.stream(batch, sink, side)
        except Exception as error:
            error.add_note(f"This happened in the batch of {side} rows {rows[0]} to {rows[-1]}.")
            raise
        out = self.division.total(sink.sink.result())
        if self.projector.scale != 1:  # whole gradients are too large to be copied for nothing
            out = out * self.projector.scale
        bad = ~(torch.isfinite(out).all(dim=1) & torch.isfinite(outputs.out_to_loss))
        if bad.any():
            raise NonFiniteError(
                f"The gradient of {side} row {rows[int(bad.nonzero()[0])]} is not finite ({int(bad.sum())} of "
                f"{len(rows)} rows in its batch). Expected finite values. Look at that row and at the checkpoint for "
                "NaN or infinite values, or compute in float32 (`model_dtype='float32'`)."
            )
        return out.cpu(), outputs.out_to_loss.float().cpu()

    def let_collate_alone(
        self,
        computer: AutoGradientComputer | ShardedGradientComputer,
        batches: RowBatches,
        rows: Sequence[int],
        batch: Any,
        draw: int = 0,
    ) -> None:
        """Let the check of an engine compare rows of this batch with the same rows, each collated alone.

        A batch that has another number of samples than rows is refused elsewhere, with an error that says so.

        Args:
            computer: the engine.
            batches: collates rows.
            rows: the rows of the batch.
            batch: the batch.
            draw: number of the draw of random rows.
        """
        fits = SplitBatch.of(batch).size == len(rows)
        computer.collated_alone = (
            (lambda position: self.in_dtype_of_model(batches.alone(rows[position], draw))) if fits else None
        )

    def in_dtype_of_model(self, batch: Any) -> Any:
        """Cast floating-point inputs (pixels, sound) to the dtype of a model cast by `model_dtype`. Labels stay."""
        if self.args.model_dtype is None:
            return batch
        dtype = getattr(torch, self.args.model_dtype)

        def cast(value: Any) -> Any:
            return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value

        if isinstance(batch, Mapping):
            labels = {*LABEL_NAMES, *find_labels(type(self.model)), *(self.args.label_names or ())}
            values = {name: value if name in labels else cast(value) for name, value in batch.items()}
            return FieldBatch(values) if isinstance(batch, FieldBatch) else values
        if isinstance(batch, tuple | list):
            made = [*map(cast, batch[:-1]), *batch[-1:]]
            return type(batch)(*made) if hasattr(batch, "_fields") else type(batch)(made)
        return batch


class _SamplePerRow:
    """Pass blocks on to a sink if they have as many samples as there are rows."""

    def __init__(self, opened: Callable[[], ProjectionSink | MapSink], rows: int) -> None:
        self.rows = rows
        self._opened = opened
        self.renew()

    def renew(self) -> None:
        """Open the sink anew."""
        self.sink = self._opened()
        self.takes_outer = self.sink.takes_outer

    def __call__(self, start: int, block: Tensor) -> None:
        self._check(block.shape[0])
        self.sink(start, _at_most_float32(block))

    def add_outer(self, start: int, left: Tensor, right: Tensor) -> None:
        self._check(left.shape[0])
        self.sink.add_outer(start, _at_most_float32(left), _at_most_float32(right))

    def _check(self, samples: int) -> None:
        if samples != self.rows:
            raise ValueError(
                f"The collator made a batch of {samples} samples from {self.rows} rows. Expected one sample per row, "
                "since scores are kept by row. Use a collator that neither drops nor adds samples."
            )


def _at_most_float32(block: Tensor) -> Tensor:
    """Round gradients of a float64 model to the dtype in which features are summed."""
    return block.float() if block.dtype == torch.float64 else block
