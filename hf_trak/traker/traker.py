"""`TRAKer`, the batch-level interface of the seeds: featurize the train set, score targets.

For checkpoint c, X_c (n, k) holds R_cᵀ ∇f of the train examples divided by √P (P attributed parameters), t_c those of
the targets, and q_c the output-to-loss gradients. The scores are

    τ = (1/C Σ_c X_c (X_cᵀX_c + λI)⁻¹ t_cᵀ) ∘ (1/C Σ_c q_c)

with the inverse as the score computer takes it: [`BasicScoreComputer`], the default, divides it by its mean absolute
value.
"""

import logging
import math
import operator
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hf_trak.errors import IncompleteStoreError, NonFiniteError
from hf_trak.gradient_computers import AbstractGradientComputer, FunctionalGradientComputer, ParameterLayout
from hf_trak.gradient_computers.batches import SplitBatch
from hf_trak.modelout_functions import AbstractModelOutput, Batch, LossModelOutput, Side, get_task
from hf_trak.modelout_functions.identity import task_identity, task_identity_v1
from hf_trak.projectors import AbstractProjector, BasicProjector, NoOpProjector, ProjectionType
from hf_trak.store.atomic import safe_name
from hf_trak.store.checkpoint_records import checked_count, checked_model_id
from hf_trak.traker.batch_rows import materialize, rows_of
from hf_trak.traker.gradient_pipeline import GradientPipeline, can_stream, is_ours, require_device
from hf_trak.traker.plugins import class_name, construct, projection_identity
from hf_trak.traker.savers import AbstractSaver, SafetensorsSaver
from hf_trak.traker.savers.run_metadata import RunMetadata
from hf_trak.traker.score_computers import AbstractScoreComputer, BasicScoreComputer
from hf_trak.version import __version__
from hf_trak.weights.checkpoints import Checkpoint, load_into
from hf_trak.weights.watch import LoadedWeights

logger = logging.getLogger(__name__)


class TRAKer:
    """Featurizes train examples and scores targets, batch by batch (seed API).

    In order: for every checkpoint `load_checkpoint` and `featurize` all batches; `finalize_features`; for every
    checkpoint `start_scoring_checkpoint` and `score` all batches of targets; `finalize_scores`. A call out of order
    raises. A run that was interrupted is continued by running it again: rows that are there already are not computed
    again.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        task: AbstractModelOutput | str,
        train_set_size: int,
        save_dir: str | Path = "./trak_results",
        load_from_save_dir: bool = True,
        device: str | torch.device = "cuda",
        gradient_computer: type[AbstractGradientComputer] = FunctionalGradientComputer,
        projector: AbstractProjector | None = None,
        saver: type[AbstractSaver] | None = None,
        score_computer: type[AbstractScoreComputer] | None = None,
        proj_dim: int = 2048,
        logging_level: int = logging.INFO,
        use_half_precision: bool = True,
        proj_max_batch_size: int = 32,
        projector_seed: int = 0,
        grad_wrt: Iterable[str] | None = None,
        lambda_reg: float = 0.0,
    ) -> None:
        """
        Args:
            model: the model, on the device where its batches will be. Checkpoints are loaded into it.
            task: the model output function: a name of `TASK_TO_MODELOUT`, an instance, or a function
                `(model_output, batch) -> (B,)`.
            train_set_size: n, the number of train examples.
            save_dir: directory of features and scores.
            load_from_save_dir: continue what `save_dir` holds. With `False`, a model id that it holds already is an
                error.
            device: where gradients are projected and scores computed. Not touched before the first batch.
            gradient_computer: class that takes per-sample gradients.
            projector: instance that projects them. `None` takes a Rademacher projection to `proj_dim`, seeded with
                `projector_seed`.
            saver: class that keeps results. `None` takes [`SafetensorsSaver`]; [`MmapSaver`] is the other.
            score_computer: class that computes scores. `None` takes [`BasicScoreComputer`].
            proj_dim: k. Ignored where a projector is given.
            logging_level: level of the loggers of the library's parts that this object creates.
            use_half_precision: store features as float16 rather than float32. Gradients are taken in the model's
                precision and projected in float32 in either case.
            proj_max_batch_size: batch size of the seeds' CUDA projector; without effect.
            projector_seed: seed of the default projector.
            grad_wrt: names of the parameters to attribute. `None` takes all that require gradients.
            lambda_reg: λ, absolute, added to the diagonal of XᵀX (of gradients divided by √P).

        Raises:
            ValueError: an unknown task or parameter name, sizes below 1, a projector of other dimensions.
            ConfigMismatchError: `save_dir` holds results of another configuration; it is left as it was.
        """
        self.model = model
        self.task = get_task(task)
        self.train_set_size = checked_count(train_set_size, "train_set_size")
        self.device = device
        self.save_dir = Path(save_dir)
        self.load_from_save_dir = load_from_save_dir
        self.use_half_precision = use_half_precision
        self.dtype = torch.float16 if use_half_precision else torch.float32
        self.grad_wrt = None if grad_wrt is None else (grad_wrt if isinstance(grad_wrt, str) else list(grad_wrt))
        self.lambda_reg = lambda_reg
        self.projector_seed = projector_seed
        self.logger = logger
        self.logger.setLevel(logging_level)

        self.layout = ParameterLayout.from_model(model, self.grad_wrt)
        self.num_params = self.layout.total
        self.normalize_factor = math.sqrt(self.num_params)
        self.gradient_computer: AbstractGradientComputer = construct(
            gradient_computer,
            {
                "model": model,
                "task": self.task,
                "grad_dim": self.num_params,
                "dtype": torch.float32,  # half precision would overflow before the division by √P
                "device": device,
            },
            {"grad_wrt": (self.grad_wrt, None)},
        )
        self.score_computer: AbstractScoreComputer = construct(
            score_computer or BasicScoreComputer,
            {"dtype": self.dtype, "device": device},
            {"lambda_reg": (lambda_reg, 0.0), "logging_level": (logging_level, logging_level)},
        )
        self.init_projector(projector, proj_dim, proj_max_batch_size)
        if isinstance(self.task, LossModelOutput) and not can_stream(self.gradient_computer):
            raise ValueError(
                "The task 'loss' takes other gradients for targets than for train examples, which "
                f"{gradient_computer} cannot tell apart. Expected a gradient computer with `stream`. Use "
                "FunctionalGradientComputer or IterativeGradientComputer."
            )
        saver_class: Any = saver or SafetensorsSaver
        self.saver: AbstractSaver = saver_class(
            save_dir=self.save_dir,
            metadata=self._metadata(),
            train_set_size=self.train_set_size,
            proj_dim=self.proj_dim,
            load_from_save_dir=load_from_save_dir,
            logging_level=logging_level,
            use_half_precision=use_half_precision,
        )
        self._stage: Side | None = None
        self._next_row = 0

    def init_projector(
        self, projector: AbstractProjector | None, proj_dim: int, proj_max_batch_size: int = 32
    ) -> None:
        """Set the projector up; called by the constructor.

        Args:
            projector: the projector, or `None` for a Rademacher projection to `proj_dim` (0: no projection).
            proj_dim: k. Ignored where a projector is given.
            proj_max_batch_size: batch size of the seeds' CUDA projector; without effect.

        Raises:
            ValueError: the projector was made for another number of parameters.
        """
        if projector is None and proj_dim:
            projector = BasicProjector(
                grad_dim=self.num_params,
                proj_dim=checked_count(proj_dim, "proj_dim"),
                seed=self.projector_seed,
                proj_type=ProjectionType.rademacher,
                device=self.device,
            )
        elif projector is None:
            projector = NoOpProjector(grad_dim=self.num_params, device=self.device)
        made_for = getattr(projector, "grad_dim", 0)
        if made_for not in (0, None, self.num_params):
            raise ValueError(
                f"The {type(projector).__name__} was made for gradients of {made_for} elements, but {self.num_params} "
                f"are attributed. Expected grad_dim={self.num_params}. Make it for the attributed parameters (see "
                "`grad_wrt`)."
            )
        if hasattr(self, "saver") and projection_identity(projector) != projection_identity(self.projector):
            raise ValueError(
                f"The {type(projector).__name__} is another projection than the {type(self.projector).__name__} that "
                f"{self.save_dir} was opened with. Expected the same one. Make another TRAKer with another save_dir."
            )
        self.projector: Any = projector
        self.proj_dim = getattr(projector, "proj_dim", 0) or self.num_params

    def load_checkpoint(
        self, checkpoint: Checkpoint, model_id: int, _allow_featurizing_already_registered: bool = False
    ) -> None:
        """Load weights into the model and open the store of `model_id` for `featurize`.

        Args:
            checkpoint: a state dict (or a module, a checkpoint directory, a weights file).
            model_id: id of the checkpoint, an integer ≥ 0.
            _allow_featurizing_already_registered: continue an id that `save_dir` holds although `load_from_save_dir`
                is off.

        Raises:
            ValueError: the weights do not fit the model.
            CheckpointMismatchError: the id is tied to other weights.
            ModelIDException: the id exists, and `load_from_save_dir` is off.
        """
        model_id = checked_model_id(model_id)
        fingerprint = self._load_weights(checkpoint)
        self.saver.open_checkpoint(model_id, fingerprint, _allow_featurizing_already_registered)
        self._stage = "train"

    def featurize(
        self, batch: Iterable[Tensor], inds: Iterable[int] | None = None, num_samples: int | None = None
    ) -> None:
        """Compute the features of a batch of train examples under the loaded checkpoint, and save them.

        Rows that are there already are skipped; the others are computed, whatever the batch boundaries of earlier
        runs.

        Args:
            batch: B samples: a sequence of tensors, or a mapping of names to tensors; batch dimension first.
            inds: their row numbers in the train set.
            num_samples: B; the rows follow those of the previous call. Exactly one of the two is given.

        Raises:
            ValueError: both or neither of `inds` and `num_samples`; row numbers out of range, given twice, or not as
                many as the batch has samples.
            IncompleteStoreError: `load_checkpoint` has not been called.
            NonFiniteError: a gradient is NaN or infinite, or overflows float16; names the sample. Nothing is saved.
        """
        self._require("train", "load_checkpoint")
        samples = materialize(batch)
        rows = rows_of(samples, inds, num_samples, self.train_set_size, "train_set_size", self._next_row)
        grads, out_to_loss, absent = self._compute(samples, rows, ~self.saver.featurized(rows), "train")
        if absent:
            self.saver.write_rows(absent, grads, out_to_loss)
        self._advance(num_samples)

    def finalize_features(self, model_ids: Iterable[int] | None = None, del_grads: bool = False) -> None:
        """Compute X (XᵀX + λI)⁻¹ of checkpoints, and save it. Those finalized with the same settings are left as they
        are.

        Args:
            model_ids: which. `None` takes all.
            del_grads: delete the gradients X afterwards. Finalizing again with another λ is then not possible.

        Raises:
            IncompleteStoreError: an id is unknown, or train rows are missing.
            SingularGramError: XᵀX + λI cannot be inverted.
            NonFiniteError: a feature is not finite in the storage dtype.
        """
        ids = self._known_ids(model_ids)
        self._stage = None
        for model_id in ids:
            self.saver.load_current_store(model_id)
            done = self.saver.featurized()
            if not done.all():
                absent = (~done).nonzero()[0]
                raise IncompleteStoreError(
                    f"Model id {model_id} lacks {len(absent)} of {self.train_set_size} train rows (first: "
                    f"{absent[:5].tolist()}). Expected all. Featurize them, or check `train_set_size`."
                )
            settings = self._settings()
            if self.saver.finalized_with(model_id) == settings:
                self.logger.info("Features of model id %d are finalized already.", model_id)
            else:
                grads = self.saver.read_grads()
                xtx = self.score_computer.get_xtx(grads)
                self.saver.write_features(self.score_computer.get_x_xtx_inv(grads, xtx), settings)
                del grads, xtx
            if del_grads:
                self.saver.del_grads(model_id)
        if hasattr(self.projector, "free_memory"):
            self.projector.free_memory()

    def start_scoring_checkpoint(self, exp_name: str, checkpoint: Checkpoint, model_id: int, num_targets: int) -> None:
        """Load weights into the model and open the store of an experiment under `model_id` for `score`.

        Args:
            exp_name: name of the experiment: one set of targets.
            checkpoint: the weights that the train set was featurized with.
            model_id: their id.
            num_targets: m.

        Raises:
            ValueError: `exp_name` is not a plain name, or `num_targets` is less than 1.
            IncompleteStoreError: the id is unknown, or its features have not been finalized with the settings of this
                object.
            CheckpointMismatchError: the id is tied to other weights.
            ConfigMismatchError: the experiment has another number of targets.
        """
        safe_name(exp_name, "exp_name")
        num_targets = checked_count(num_targets, "num_targets")
        model_id = self._known_ids([model_id])[0]
        self._require_finalized(model_id)
        self.saver.verify_checkpoint(model_id, self._load_weights(checkpoint))
        self.saver.open_experiment(exp_name, num_targets, model_id)
        self._num_targets = num_targets
        self._stage = "target"

    def score(
        self, batch: Iterable[Tensor], inds: Iterable[int] | None = None, num_samples: int | None = None
    ) -> None:
        """Compute the features of a batch of targets under the loaded checkpoint, and save them.

        Args, errors and skipped rows as in [`~TRAKer.featurize`], with `num_targets` in place of `train_set_size` and
        `start_scoring_checkpoint` in place of `load_checkpoint`.
        """
        self._require("target", "start_scoring_checkpoint")
        samples = materialize(batch)
        rows = rows_of(samples, inds, num_samples, self._num_targets, "num_targets", self._next_row)
        grads, _, absent = self._compute(samples, rows, ~self.saver.scored(rows), "target")
        if absent:
            self.saver.write_target_rows(absent, grads)
        self._advance(num_samples)

    def finalize_scores(
        self, exp_name: str, model_ids: Iterable[int] | None = None, allow_skip: bool = False
    ) -> Tensor:
        """Compute the scores of an experiment, and save them.

        Args:
            exp_name: its name.
            model_ids: the checkpoints to average over. `None` takes all.
            allow_skip: leave out checkpoints without gradients of all targets, with a warning, instead of raising.

        Returns:
            `(n, m)`, float32, on the CPU: element [i, j] is the score of train row i for target j.

        Raises:
            IncompleteStoreError: an experiment or id is unknown, features are not finalized, or targets are missing
                (with `allow_skip`, if no checkpoint is left).
            NonFiniteError: a score is NaN or infinite.
        """
        safe_name(exp_name, "exp_name")
        self._stage = None
        if exp_name not in self.saver.experiments:
            raise IncompleteStoreError(
                f"Experiment {exp_name!r} is not in {self.save_dir}, which has "
                f"{sorted(self.saver.experiments) or 'none'}. Expected one whose targets have been scored. Call "
                "`start_scoring_checkpoint` and `score` first."
            )
        num_targets = self.saver.experiments[exp_name]["num_targets"]
        scores = torch.zeros(self.train_set_size, num_targets)
        out_to_loss = torch.zeros(self.train_set_size, dtype=torch.float64)
        used = []
        for model_id in self._known_ids(model_ids):
            problem = self._missing_targets(exp_name, model_id, num_targets)
            if problem and not allow_skip:
                raise IncompleteStoreError(
                    f"{problem} Score them first, or pass `allow_skip=True` to leave this id out."
                )
            if problem:
                self.logger.warning("%s It is left out.", problem)
                continue
            self._require_finalized(model_id)
            targets = self.saver.read_targets()
            self.saver.load_current_store(model_id)
            features, q = self.saver.read_features()
            self.score_computer.get_scores(features, targets, accumulator=scores)
            out_to_loss += q
            used.append(model_id)
        if not used:
            raise IncompleteStoreError(
                f"No model id has gradients of all targets of {exp_name!r}. Expected at least one. Call `score` first."
            )
        scores /= len(used)
        scores *= (out_to_loss / len(used)).to(scores.dtype)[:, None]
        if not bool(torch.isfinite(scores).all()):
            row = int((~torch.isfinite(scores).all(dim=1)).nonzero()[0])
            raise NonFiniteError(
                f"The scores of train row {row} are not finite. Expected finite ones. Use `use_half_precision=False`, "
                "or a larger `lambda_reg`."
            )
        self.saver.write_scores(exp_name, scores, used)
        return scores

    # -- one batch ---------------------------------------------------------------------------------------------------

    def _compute(self, batch: Batch, rows: list[int], wanted: Any, side: Side) -> tuple[Tensor, Tensor, list[int]]:
        """Projected gradients and q of the samples that are wanted (one flag per sample), and their rows."""
        keep = [i for i in range(len(rows)) if wanted[i]]
        if not keep:
            return torch.empty(0, self.proj_dim), torch.empty(0), []
        if len(keep) < len(rows):
            split = SplitBatch.of(batch)
            batch = split.rebuild({key: tensor[keep] for key, tensor in split.mapped.items()})
        require_device(self.device)
        self._weights.verify()
        pipeline = GradientPipeline(
            self.gradient_computer, self.projector, self.num_params, self.proj_dim, self.device
        )
        grads, q = pipeline(batch, len(keep), self.saver.require_model_id(), side)
        return grads / self.normalize_factor, q, [rows[i] for i in keep]

    def _advance(self, num_samples: int | None) -> None:
        """Count rows that were written in sequence; only after they were, so that a failed call can be repeated."""
        if num_samples is not None:
            self._next_row += operator.index(num_samples)

    # -- checkpoints and settings ------------------------------------------------------------------------------------

    def _load_weights(self, checkpoint: Checkpoint) -> str:
        """Load weights into the model; returns their fingerprint. Until the caller sets a stage, no batch is
        accepted.
        """
        self._stage = None
        load_into(self.model, checkpoint)
        self.model.eval()
        self.gradient_computer.load_model_params(self.model)
        self.task.bind(self.model)
        self._next_row = 0
        self._weights = LoadedWeights(self.model)
        return self._weights.fingerprint

    def _known_ids(self, model_ids: Iterable[int] | None) -> list[int]:
        known = sorted(self.saver.model_ids)
        ids = known if model_ids is None else list(dict.fromkeys(checked_model_id(i) for i in model_ids))
        unknown = [model_id for model_id in ids if model_id not in known]
        if unknown or not ids:
            raise IncompleteStoreError(
                f"Model ids {unknown or 'none at all'} were given, but {self.save_dir} has {known or 'none'}. "
                "Expected ids of featurized checkpoints. Call `load_checkpoint` and `featurize` first."
            )
        return ids

    def _settings(self) -> dict[str, Any]:
        """What the finalized features depend on besides the gradients."""
        return {"lambda_reg": self.lambda_reg, "score_computer": class_name(type(self.score_computer))}

    def _require_finalized(self, model_id: int) -> None:
        found = self.saver.finalized_with(model_id)
        if found != self._settings():
            state = "are not finalized" if found is None else f"were finalized with {dict(found)}"
            raise IncompleteStoreError(
                f"The features of model id {model_id} in {self.save_dir} {state}. Expected features finalized with "
                f"{self._settings()}. Call `finalize_features` first."
            )

    def _missing_targets(self, exp_name: str, model_id: int, num_targets: int) -> str | None:
        """What keeps a checkpoint out of an experiment's scores, as a sentence. Opens the experiment for reading."""
        if not self.saver.load_experiment(exp_name, model_id):
            return f"Model id {model_id} has no gradients of the targets of {exp_name!r}."
        absent = (~self.saver.scored()).nonzero()[0]
        if not len(absent):
            return None
        return (
            f"Model id {model_id} lacks {len(absent)} of {num_targets} targets of {exp_name!r} (first: "
            f"{absent[:5].tolist()})."
        )

    def _require(self, stage: Side, call: str) -> None:
        if self._stage != stage:
            name = "featurize" if stage == "train" else "score"
            raise IncompleteStoreError(
                f"`{name}` was called while no checkpoint was open for it. Expected `{call}` before the first batch "
                f"of each checkpoint (and again after any other stage, or after an error in it). Call `{call}`."
            )

    def _metadata(self) -> RunMetadata:
        """All that defines the features."""
        computer = type(self.gradient_computer)
        metadata = {
            "api": "TRAKer",  # features are divided by √P, unlike those of TrakAttributor
            "gradient_computer": "built-in" if is_ours(computer) else class_name(computer),  # the former agree
            "hf_trak_version": __version__,
            "model_class": type(self.model).__name__,
            "parameters": self.layout.to_list(),
            "parameters_fingerprint": self.layout.fingerprint,
            "projection": projection_identity(self.projector),
            "task": task_identity(self.task, self.model),
        }
        return RunMetadata(metadata, {**metadata, "task": task_identity_v1(self.task)})
