"""Log-probabilities of training rows under the reference model of a trainer, computed once and kept as columns."""

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import send_to_device

from hf_trak.data.images import ImageTokens, SplitRows, split_at_images
from hf_trak.data.preferences import PreparingCollator, kind_of
from hf_trak.identity.row_digest import fingerprint_dataset
from hf_trak.modelout_functions.base import call_model
from hf_trak.modelout_functions.batches import evaluating
from hf_trak.modelout_functions.completions import CompletionModelOutput
from hf_trak.modelout_functions.dpo import DPOModelOutput
from hf_trak.modelout_functions.kto import KTOModelOutput
from hf_trak.runtime.processes import Processes
from hf_trak.runtime.progress import with_column
from hf_trak.runtime.sharding import is_sharded
from hf_trak.store.atomic import json_bytes, read_json, write_bytes
from hf_trak.weights.adapters import adapter_tensors
from hf_trak.weights.checkpoints import fingerprint_state_dict

logger = logging.getLogger(__name__)

DIRECTORY = "reference_log_probs"
"""Where they are kept, in the output directory."""

REFERRING: dict[str | None, tuple[str, ...]] = {
    "DPOTrainer": ("ref_chosen_logps", "ref_rejected_logps"),
    "KTOTrainer": ("ref_logps", "ref_KL_logps"),
}
"""Trainers of TRL whose losses compare a model with its reference, and the columns with what that says."""


def with_references(trainer: Any, rows: Any, output_dir: str | Path, use_cpu: bool = False) -> Any:
    """Add log-probabilities of the reference model to training rows, unless they have them.

    They are computed once, and kept in the output directory, by the contents of rows and reference model.

    Args:
        trainer: the trainer, with its reference model, or with an adapter that can be switched off.
        rows: prepared rows.
        output_dir: the output directory of the attribution.
        use_cpu: whether the attribution runs on the CPU.

    Returns:
        The rows with the columns that their task needs; the rows themselves if it needs none.

    Raises:
        ValueError: there is no reference model, or it is divided over processes.
        StoreError: the file cannot be read or written.
    """
    kind = kind_of(trainer)
    if kind not in REFERRING:
        return rows
    needed = REFERRING[kind]
    if kind == "KTOTrainer" and "KL_completion_ids" not in rows.column_names:
        needed = needed[:1]
    missing = [name for name in needed if name not in rows.column_names]
    if not missing:
        return rows
    model = _reference_of(trainer)
    processes = Processes(use_cpu)
    # names and contents alone: the weights of an adapter that is switched off do not matter
    adapter = {name for name, _ in adapter_tensors(model)} if hasattr(model, "peft_config") else set()
    weights = fingerprint_state_dict({n: t for n, t in model.state_dict().items() if n not in adapter})
    digest = f"{fingerprint_dataset(rows)[:16]}-{weights[:16]}"
    path = Path(output_dir) / DIRECTORY / f"{digest}.json"

    def columns() -> dict[str, list[float]]:
        if not path.exists():
            logger.info("Log-probabilities of %d rows under the reference model.", len(rows))
            write_bytes(path, json_bytes(_reference_columns(trainer, model, rows, needed)))
        return read_json(path)

    found = processes.broadcast_from_main(columns)
    for name in missing:
        rows = with_column(rows, name, found[name])
    return rows


def _reference_of(trainer: Any) -> Any:
    model = getattr(trainer, "ref_model", None)
    if model is None:
        model = trainer.accelerator.unwrap_model(trainer.model)
        if not hasattr(model, "peft_config"):
            raise ValueError(
                f"The rows of the {type(trainer).__name__} have no log-probabilities of the reference model, and the "
                "trainer holds no such model. Expected columns of `precompute_ref_log_probs=True`, or `ref_model=`. "
                "Give the trainer one of them."
            )
    model = trainer.accelerator.unwrap_model(model)
    if is_sharded(model) or getattr(trainer, "is_deepspeed_enabled", False):
        raise ValueError(
            "The reference model is divided over processes. Expected its log-probabilities as columns of the rows. "
            "Set `precompute_ref_log_probs=True` in the arguments of the trainer."
        )
    return model


def _reference_columns(
    trainer: Any, model: torch.nn.Module, rows: Any, names: tuple[str, ...]
) -> dict[str, list[float]]:
    task = DPOModelOutput() if kind_of(trainer) == "DPOTrainer" else KTOModelOutput()
    collate = task.collator(PreparingCollator(trainer))
    size = trainer.args.per_device_train_batch_size
    device = next(model.parameters()).device
    own = getattr(trainer, "ref_model", None) is not None
    tokens = ImageTokens.of(model)
    found = {name: torch.zeros(len(rows)) for name in names}
    task.bind(model)
    with evaluating(model), nullcontext() if own else _without_adapter(model):
        for start in range(0, len(rows), size):
            some = list(rows.select(range(start, min(start + size, len(rows)))))
            made = split_at_images(collate(some), some, tokens)
            for places, part in made if isinstance(made, SplitRows) else [(list(range(len(some))), made)]:
                batch = send_to_device(part, device)
                for name, values in _log_probs(task, model, batch, names).items():
                    found[name][[start + place for place in places]] = values.float().cpu()
    return {name: values.tolist() for name, values in found.items()}


def _log_probs(
    task: CompletionModelOutput, model: torch.nn.Module, batch: Mapping[str, Any], names: tuple[str, ...]
) -> dict[str, torch.Tensor]:
    """Compute the columns of one batch, `(B,)` each."""

    def sums(given: Mapping[str, Any]) -> torch.Tensor:
        args, kwargs = task.model_inputs(given)
        return task.sums(call_model(model, None, None, args, kwargs), given)

    found = list(sums(batch).unbind(1)) if isinstance(task, DPOModelOutput) else [sums(batch)]
    if len(found) < len(names):
        found.append(sums({k.removeprefix("KL_"): v for k, v in batch.items() if k.startswith("KL_")}))
    return dict(zip(names, found, strict=True))


@contextmanager
def _without_adapter(model: Any) -> Iterator[None]:
    """Switch the adapter off, or to one called "ref" that TRL takes for the reference."""
    if "ref" not in model.peft_config:
        with model.disable_adapter():
            yield
        return
    active = model.active_adapter
    flags = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    model.set_adapter("ref")
    try:
        yield
    finally:
        model.set_adapter(active)
        for parameter, flag in flags:  # which `set_adapter` changes
            parameter.requires_grad_(flag)
