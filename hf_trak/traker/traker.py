"""`TRAKer`, the interface of the `trak` API: featurize the train set batch by batch, then score targets.

For checkpoint c, X_c (n, k) holds R_cᵀ ∇f of the train examples divided by √P (P attributed parameters), t_c those of
the targets, and q_c the output-to-loss gradients. The scores are

    τ = (1/C Σ_c X_c (X_cᵀX_c + λI)⁻¹ t_cᵀ) ∘ (1/C Σ_c q_c)

with the inverse as the score computer takes it: [`BasicScoreComputer`], the default, divides it by its mean absolute
entry.
"""

import logging
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hf_trak.errors import IncompleteStoreError, NonFiniteError
from hf_trak.gradient_computers import AbstractGradientComputer, FunctionalGradientComputer, ParameterLayout
from hf_trak.modelout_functions import AbstractModelOutput, Batch, Side, get_task
from hf_trak.projectors import AbstractProjector, BasicProjector, NoOpProjector, ProjectionType
from hf_trak.runtime.arguments import named_arguments
from hf_trak.runtime.checks import checked_int, non_finite_rows
from hf_trak.store.atomic import safe_name
from hf_trak.store.checkpoint_records import checked_model_id
from hf_trak.traker import batch_rows as requirements
from hf_trak.traker import plugins
from hf_trak.traker.batch_rows import OpenCheckpoint, materialize, selected
from hf_trak.traker.savers import AbstractSaver, MmapSaver
from hf_trak.traker.score_computers import AbstractScoreComputer, BasicScoreComputer
from hf_trak.weights.checkpoints import Checkpoint, load_into
from hf_trak.weights.watch import LoadedWeights

logger = logging.getLogger(__name__)


@named_arguments
class TRAKer:
    """Featurizes train examples and scores targets, batch by batch (`trak` API).

    Call, in this order: for every checkpoint `load_checkpoint`, and `featurize` for each batch of train examples; then
    `finalize_features`; for every checkpoint `start_scoring_checkpoint`, and `score` for each batch of targets; then
    `finalize_scores`. A call out of order raises an error. To continue an interrupted run, run the same script again:
    it does not recompute train rows that have been saved.

    Args:
        model (`torch.nn.Module`):
            The model, on the device of its batches. Checkpoints are loaded into it.
        task (`str` or `AbstractModelOutput`):
            The model output function: a name in `TASK_TO_MODELOUT`, an instance, or a function
            `(model_output, batch) -> (B,)`.
        train_set_size (`int`):
            Number of train examples, n.
        save_dir (`str` or `Path`, *optional*, defaults to `"./trak_results"`):
            Directory of features and scores.
        load_from_save_dir (`bool`, *optional*, defaults to `True`):
            Continue what `save_dir` holds. With `False`, a model id that it already holds is an error.
        device (`str` or `torch.device`, *optional*, defaults to `"cuda"`):
            Where gradients are projected and scores computed. It is not touched before the first batch.
        gradient_computer (`type[AbstractGradientComputer]`, *optional*, defaults to `FunctionalGradientComputer`):
            Class that computes per-sample gradients.
        projector (`AbstractProjector`, *optional*):
            Instance that projects gradients. By default a Rademacher projection to `proj_dim`.
        saver (`type[AbstractSaver]`, *optional*, defaults to `MmapSaver`):
            Class that saves results.
        score_computer (`type[AbstractScoreComputer]`, *optional*, defaults to `BasicScoreComputer`):
            Class that computes features and scores from projected gradients.
        proj_dim (`int`, *optional*, defaults to 2048):
            Number of columns of the features, k. Ignored if a projector is given.
        logging_level (`int`, *optional*, defaults to `logging.INFO`):
            Level of the loggers of this object and of its parts.
        use_half_precision (`bool`, *optional*, defaults to `True`):
            Store features as float16 instead of float32. Gradients are computed in the model's precision and projected
            in float32 in either case.
        proj_max_batch_size (`int`, *optional*, defaults to 32):
            Without effect. The `trak` API has it for its CUDA projector.
        projector_seed (`int`, *optional*, defaults to 0):
            Random seed of the default projector.
        grad_wrt (iterable of `str`, *optional*):
            Names of the parameters to attribute. By default all that require gradients.
        lambda_reg (`float`, *optional*, defaults to 0.0):
            λ, absolute, added to the diagonal of XᵀX, where X holds gradients divided by √P.

    Raises:
        TypeError: a class was expected, and something else was given.
        ValueError: the task or a parameter name is unknown, a size is below 1, or the projector has other dimensions.
        ConfigMismatchError: `save_dir` holds results of another configuration; it is left as it was.
        StoreError: a file in `save_dir` is damaged.
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
        self.model = model
        self.task = get_task(task)
        self.train_set_size = checked_int(train_set_size, "train_set_size", 1, type_error=ValueError)
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
        self.gradient_computer: AbstractGradientComputer = plugins.construct(
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
        plugins.require_both_sides(self.gradient_computer, self.task)
        self.score_computer: AbstractScoreComputer = plugins.construct(
            score_computer or BasicScoreComputer,
            {"dtype": self.dtype, "device": device},
            {"lambda_reg": (lambda_reg, 0.0), "logging_level": (logging_level, logging_level)},
        )
        self.init_projector(projector, proj_dim, proj_max_batch_size)

        # The saver comes last: it creates files, and none may appear if an argument is wrong.
        saver_class: Any = saver or MmapSaver
        self.saver: AbstractSaver = saver_class(
            save_dir=self.save_dir,
            metadata=plugins.run_metadata(model, self.layout, self.task, self.gradient_computer, self.projector),
            train_set_size=self.train_set_size,
            proj_dim=self.proj_dim,
            load_from_save_dir=load_from_save_dir,
            logging_level=logging_level,
            use_half_precision=use_half_precision,
        )
        self._opened: OpenCheckpoint | None = None

    def init_projector(
        self, projector: AbstractProjector | None, proj_dim: int, proj_max_batch_size: int = 32
    ) -> None:
        """Set up the projector. The constructor calls this.

        Args:
            projector (`AbstractProjector`, *optional*):
                The projector. `None` stands for a Rademacher projection to `proj_dim`, or for no projection if that is
                0.
            proj_dim (`int`):
                Number of columns of the features, k. Ignored if a projector is given.
            proj_max_batch_size (`int`, *optional*, defaults to 32):
                Without effect. The `trak` API has it for its CUDA projector.

        Raises:
            ValueError: the projector was made for another number of parameters, or is another projection than that of
                the open directory.
        """
        if projector is None and proj_dim:
            proj_dim = checked_int(proj_dim, "proj_dim", 1, type_error=ValueError)
            kind, seed = ProjectionType.rademacher, self.projector_seed
            projector = BasicProjector(self.num_params, proj_dim, seed, kind, self.device)
        elif projector is None or (type(projector) is NoOpProjector and not projector.grad_dim):
            projector = NoOpProjector(grad_dim=self.num_params, device=self.device)
        plugins.require_size(projector, self.num_params)
        chosen = plugins.projection_identity(projector)
        if hasattr(self, "saver") and chosen != plugins.projection_identity(self.projector):
            raise ValueError(
                f"The {type(projector).__name__} is another projection than the {type(self.projector).__name__} that "
                f"{self.save_dir} was opened with. Make another TRAKer with another save_dir."
            )
        self.projector: Any = projector
        self.proj_dim = getattr(projector, "proj_dim", 0) or self.num_params

    def load_checkpoint(
        self, checkpoint: Checkpoint, model_id: int, _allow_featurizing_already_registered: bool = False
    ) -> None:
        """Load a checkpoint into the model, and open its model id for `featurize`.

        Args:
            checkpoint (`dict[str, torch.Tensor]`):
                A state dict. A module, a checkpoint directory or a file of weights works, too.
            model_id (`int`):
                Id of the checkpoint, at least 0.
            _allow_featurizing_already_registered (`bool`, *optional*, defaults to `False`):
                Continue an id that `save_dir` holds although `load_from_save_dir` is off.

        Raises:
            ValueError: the weights do not fit the model.
            CheckpointMismatchError: the id is tied to other weights.
            ModelIDException: the id exists, and `load_from_save_dir` is off.
        """
        model_id = checked_model_id(model_id)
        weights = self._load_weights(checkpoint)
        self.saver.open_checkpoint(model_id, weights.fingerprint, _allow_featurizing_already_registered)
        self._opened = OpenCheckpoint("train", weights, self.train_set_size, "train_set_size")

    def featurize(
        self, batch: Iterable[Tensor], inds: Iterable[int] | None = None, num_samples: int | None = None
    ) -> None:
        """Compute the projected gradients of a batch of train examples under the loaded checkpoint, and save them.

        Rows that have been saved are skipped, whatever the batches of earlier runs were.

        Args:
            batch (iterable of `torch.Tensor`, or `Mapping[str, torch.Tensor]`):
                B samples, batch dimension first.
            inds (iterable of `int`, *optional*):
                Their row numbers in the train set.
            num_samples (`int`, *optional*):
                B. The rows follow those of the previous call. Exactly one of `inds` and `num_samples` must be given.

        Raises:
            ValueError: both or neither of `inds` and `num_samples` were given, or row numbers are out of range, named
                twice, or not as many as the samples.
            TypeError: the batch is a single tensor, or a row number is not an integer.
            IncompleteStoreError: `load_checkpoint` has not been called.
            CheckpointMismatchError: the model's weights have changed since `load_checkpoint`.
            NonFiniteError: a gradient is NaN or infinite, or overflows float16; names the sample. Nothing is saved.
        """
        opened = self._require_opened("train")
        samples = materialize(batch)
        rows = opened.rows(samples, inds, num_samples)
        absent = np.flatnonzero(~self.saver.featurized(rows))
        if len(absent):
            grads, out_to_loss = self._compute(opened, samples, absent)
            self.saver.write_rows([rows[i] for i in absent], grads, out_to_loss)
        opened.advance(num_samples)

    def finalize_features(self, model_ids: Iterable[int] | None = None, del_grads: bool = False) -> None:
        """Compute the features X (XᵀX + λI)⁻¹ of checkpoints, and save them.

        Checkpoints that were finalized with the same settings are skipped.

        Args:
            model_ids (iterable of `int`, *optional*):
                Model ids of the checkpoints. By default all.
            del_grads (`bool`, *optional*, defaults to `False`):
                Delete the gradients X afterwards. They cannot be finalized again, with another λ say, after that.

        Raises:
            IncompleteStoreError: an id is unknown, or train rows are missing.
            SingularGramError: XᵀX + λI cannot be inverted.
            NonFiniteError: a feature is not finite in the storage dtype.
        """
        ids = requirements.registered_ids(self.saver, model_ids)
        self._opened = None
        settings = self._settings()
        for model_id in ids:
            self.saver.load_current_store(model_id)
            requirements.require_all_rows(self.saver, model_id, self.train_set_size)
            if self.saver.finalized_with(model_id) == settings:
                self.logger.info("The features of model id %d have been finalized before.", model_id)
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
        """Load a checkpoint into the model, and open an experiment under its model id for `score`.

        Args:
            exp_name (`str`):
                Name of the experiment, which is one set of targets.
            checkpoint (`dict[str, torch.Tensor]`):
                The weights that the train set was featurized with.
            model_id (`int`):
                Their model id.
            num_targets (`int`):
                Number of targets, m.

        Raises:
            ValueError: `exp_name` is not a plain name, or `num_targets` is below 1.
            IncompleteStoreError: the id is unknown, or its features have not been finalized with the settings of this
                object.
            CheckpointMismatchError: the id is tied to other weights.
            ConfigMismatchError: the experiment has another number of targets.
        """
        safe_name(exp_name, "exp_name")
        num_targets = checked_int(num_targets, "num_targets", 1, type_error=ValueError)
        model_id = requirements.registered_ids(self.saver, [model_id])[0]
        requirements.require_finalized(self.saver, model_id, self._settings())
        weights = self._load_weights(checkpoint)
        self.saver.verify_checkpoint(model_id, weights.fingerprint)
        self.saver.open_experiment(exp_name, num_targets, model_id)
        self._opened = OpenCheckpoint("target", weights, num_targets, "num_targets")

    def score(
        self, batch: Iterable[Tensor], inds: Iterable[int] | None = None, num_samples: int | None = None
    ) -> None:
        """Compute the projected gradients of a batch of targets under the loaded checkpoint, and save them.

        Targets that were saved under these numbers are replaced, as `trak` does: they may be others.

        Args:
            batch (iterable of `torch.Tensor`, or `Mapping[str, torch.Tensor]`):
                B targets, batch dimension first.
            inds (iterable of `int`, *optional*):
                Their numbers among the targets.
            num_samples (`int`, *optional*):
                B. The targets follow those of the previous call. Exactly one of `inds` and `num_samples` must be
                given.

        Raises:
            IncompleteStoreError: `start_scoring_checkpoint` has not been called.
            ValueError, TypeError, CheckpointMismatchError, NonFiniteError: as for [`~TRAKer.featurize`].
        """
        opened = self._require_opened("target")
        samples = materialize(batch)
        rows = opened.rows(samples, inds, num_samples)
        grads, _ = self._compute(opened, samples, np.arange(len(rows)))
        self.saver.write_target_rows(rows, grads)
        opened.advance(num_samples)

    def finalize_scores(
        self, exp_name: str, model_ids: Iterable[int] | None = None, allow_skip: bool = False
    ) -> Tensor:
        """Compute the scores of an experiment, and save them.

        Args:
            exp_name (`str`):
                Name of the experiment.
            model_ids (iterable of `int`, *optional*):
                Model ids of the checkpoints to average over. By default all.
            allow_skip (`bool`, *optional*, defaults to `False`):
                Leave out checkpoints without gradients of all targets, with a warning, instead of raising an error.

        Returns:
            `torch.Tensor` of shape `(n, m)`, float32, on the CPU: element [i, j] is the score of train row i for
            target j.

        Raises:
            IncompleteStoreError: an experiment or id is unknown, features are not finalized, or targets are missing
                (with `allow_skip`, if no checkpoint is left).
            NonFiniteError: a score is NaN or infinite.
        """
        safe_name(exp_name, "exp_name")
        self._opened = None
        num_targets = requirements.require_experiment(self.saver, exp_name)
        scores = torch.zeros(self.train_set_size, num_targets)
        mean_q = torch.zeros(self.train_set_size, dtype=torch.float64)
        used: list[int] = []
        for model_id in requirements.registered_ids(self.saver, model_ids):
            problem = requirements.missing_targets(self.saver, exp_name, model_id)
            if problem and not allow_skip:
                raise IncompleteStoreError(
                    f"{problem} Score them first, or pass `allow_skip=True` to leave this id out."
                )
            if problem:
                self.logger.warning("%s This model id is left out.", problem)
                continue
            requirements.require_finalized(self.saver, model_id, self._settings())
            targets = self.saver.read_targets()
            self.saver.load_current_store(model_id)
            features, out_to_loss = self.saver.read_features()
            self.score_computer.get_scores(features, targets, accumulator=scores)
            mean_q += out_to_loss
            used.append(model_id)
        if not used:
            raise IncompleteStoreError(
                f"No model id has gradients of all targets of {exp_name!r}. Expected at least one. Call `score` first."
            )
        # The mean of the products times the mean of q, which is not the mean of their products.
        scores /= len(used)
        scores *= (mean_q / len(used)).to(scores.dtype)[:, None]
        if rows := non_finite_rows(scores):
            raise NonFiniteError(
                f"The scores of train row {rows[0]} are not finite. Pass `use_half_precision=False`, or a larger "
                "`lambda_reg`."
            )
        self.saver.write_scores(exp_name, scores, used)
        return scores

    def _load_weights(self, checkpoint: Checkpoint) -> LoadedWeights:
        """Load weights into the model. No batch is accepted until the caller sets `_opened`."""
        self._opened = None
        load_into(self.model, checkpoint)
        self.model.eval()
        self.gradient_computer.load_model_params(self.model)
        self.task.bind(self.model)
        return LoadedWeights(self.model)

    def _require_opened(self, side: Side) -> OpenCheckpoint:
        """Return the open checkpoint. Raise `IncompleteStoreError` if there is none for this side."""
        if self._opened is None or self._opened.side != side:
            name, call = ("featurize", "load_checkpoint") if side == "train" else ("score", "start_scoring_checkpoint")
            raise IncompleteStoreError(
                f"`{name}` was called while no checkpoint was open for it. Expected a call of `{call}` before the "
                "first batch of each checkpoint, and again after any other step or an error in it."
            )
        return self._opened

    def _compute(self, opened: OpenCheckpoint, batch: Batch, chosen: np.ndarray) -> tuple[Tensor, Tensor]:
        """Compute projected gradients `(r, k)`, divided by √P, and q `(r,)` of r chosen samples of a batch."""
        plugins.require_device(self.device)
        opened.weights.verify()
        pipeline = plugins.GradientPipeline(
            self.gradient_computer, self.projector, self.num_params, self.proj_dim, self.device
        )
        part = selected(batch, chosen)
        grads, out_to_loss = pipeline(part, len(chosen), self.saver.require_model_id(), opened.side)
        return grads / self.normalize_factor, out_to_loss

    def _settings(self) -> dict[str, Any]:
        """Return the settings that finalized features depend on, besides the gradients."""
        return {"lambda_reg": self.lambda_reg, "score_computer": plugins.class_name(type(self.score_computer))}
