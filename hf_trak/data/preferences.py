"""Rows of TRL's trainers of preferences, rewards and policies: their task and their preparation.

Nothing of TRL is imported: a trainer is known by the name of its class, and asked for its own settings and methods.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from datasets import Dataset

from hf_trak.data.text_columns import ColumnsCollator, embedding_task, pair_task, refuse, signature_columns
from hf_trak.modelout_functions.base import BatchedModelOutput
from hf_trak.modelout_functions.dpo import DPOModelOutput, ORPOModelOutput, RewardModelOutput
from hf_trak.modelout_functions.kto import KTOModelOutput
from hf_trak.modelout_functions.pairs import REFERENCES
from hf_trak.modelout_functions.policy import GRPOModelOutput, PPOModelOutput
from hf_trak.runtime.progress import no_progress_bars

RAW_COLUMNS = ("prompt", "chosen", "rejected", "completion", "tools", "chat_template_kwargs")
"""Columns of rows as people have them, from which trainers make tokens."""

PREPARED = {
    "DPOTrainer": ("chosen_ids", "rejected_ids"),
    "RewardTrainer": ("chosen_ids", "rejected_ids"),
    "KTOTrainer": ("completion_ids",),
    "ORPOTrainer": ("chosen_input_ids", "rejected_input_ids"),
    "GRPOTrainer": ("completion_ids",),
    "RLOOTrainer": ("completion_ids",),
}
"""Columns of prepared rows, by trainer."""


def kind_of(trainer: Any) -> str | None:
    """Return the name of TRL's trainer of preferences that a trainer is, or derives from; `None` for any other."""
    for cls in type(trainer).__mro__:
        if cls.__module__.partition(".")[0] == "trl" and cls.__name__ in PREPARED:
            return cls.__name__
    return None


def trainer_task(trainer: Any, rows: Any = None) -> BatchedModelOutput | None:
    """Make the task of a trainer of preferences, of embeddings or of cross-encoders, with the settings of its loss.

    Args:
        trainer: any trainer.
        rows: the training rows. Those of policies may have columns that ask for another task.

    Returns:
        The task; `None` for any other trainer, whose task follows from its model.

    Raises:
        ValueError: the loss is none that a task here has.
    """
    kind = kind_of(trainer)
    if kind is None:
        return embedding_task(trainer) or pair_task(trainer)
    makers: dict[str, Callable[[], BatchedModelOutput]] = {
        "DPOTrainer": lambda: _dpo(trainer),
        "RewardTrainer": lambda: RewardModelOutput(trainer.args.center_rewards_coefficient or None),
        "KTOTrainer": lambda: KTOModelOutput(
            trainer.beta, trainer.desirable_weight, trainer.undesirable_weight, trainer.loss_type
        ),
        "ORPOTrainer": lambda: ORPOModelOutput(trainer.beta),
        "GRPOTrainer": lambda: _grpo(trainer, rows),
        "RLOOTrainer": lambda: GRPOModelOutput("sum", trainer.temperature),
    }
    return makers[kind]()


def _dpo(trainer: Any) -> BatchedModelOutput:
    _refuse(trainer, "loss_types", len(trainer.loss_types) == 1, "a single loss")
    _refuse(trainer, "f_divergence_type", trainer.f_divergence_type == "reverse_kl", "'reverse_kl'")
    _refuse(trainer, "ld_alpha", trainer.ld_alpha is None, "None")
    _refuse(trainer, "use_weighting", not trainer.use_weighting, "False")
    known = ("sigmoid", "sigmoid_norm", "hinge", "ipo", "robust")
    _refuse(trainer, "loss_types", trainer.loss_types[0] in known, f"one of {list(known)}")
    name = trainer.loss_types[0]
    return DPOModelOutput(trainer.beta, name, trainer.label_smoothing if name == "robust" else 0.0)


def _grpo(trainer: Any, rows: Any) -> BatchedModelOutput:
    known = ("grpo", "bnpo", "dr_grpo", "dapo")
    _refuse(trainer, "loss_type", trainer.loss_type in known, f"one of {list(known)}")
    _refuse(trainer, "top_entropy_quantile", trainer.top_entropy_quantile >= 1, "1.0")
    columns = getattr(rows, "column_names", None) or ()
    aggregation: Any = "mean" if trainer.loss_type == "grpo" else "sum"
    moved = "old_logps" in columns
    per_token = "advantage" in columns and not isinstance(rows[0]["advantage"], int | float)
    if not (moved or per_token or trainer.beta):
        return GRPOModelOutput(aggregation, trainer.temperature)
    if moved:
        _refuse(trainer, "importance_sampling_level", trainer.importance_sampling_level == "token", "'token'")
    _refuse(trainer.args, "delta", trainer.args.delta is None, "None")
    return PPOModelOutput(
        aggregation,
        trainer.temperature,
        trainer.epsilon_low,
        trainer.epsilon_high,
        float(trainer.beta),
        bool(trainer.args.use_bias_correction_kl),
    )


def _refuse(owner: Any, name: str, fine: bool, expected: str) -> None:
    refuse(owner, name, fine, expected, "Pass `task=`, a function of your own (model_output, batch) -> (B,).")


class PreparingCollator(ColumnsCollator):
    """The collator of a trainer, which also takes rows as people have them, through the trainer's own preparation."""

    def __init__(self, trainer: Any) -> None:
        """
        Args:
            trainer: a trainer of preferences.
        """
        own = signature_columns(trainer) if kind_of(trainer) not in ("GRPOTrainer", "RLOOTrainer") else ()
        references = REFERENCES if _of_images(trainer) else ()
        columns = dict.fromkeys([*own, *PREPARED[str(kind_of(trainer))], *RAW_COLUMNS, *references])
        super().__init__(trainer.data_collator, tuple(columns))
        self.trainer = trainer

    def __call__(self, rows: list[Any]) -> Any:
        """Collate rows into a batch.

        Raises:
            ValueError: rows cannot be prepared, see [`prepared_rows`]; or several processes would have to prepare them
                together.
        """
        if not _of_images(self.trainer):
            return self.collator(self.ready(rows))
        # TRL's collator of images and messages changes rows, and leaves log-probabilities out.
        batch = dict(self.collator([dict(row) for row in rows]))
        references = {name: torch.tensor([float(row[name]) for row in rows]) for name in REFERENCES if name in rows[0]}
        return {**batch, **references}

    def ready(self, rows: list[Any]) -> list[Any]:
        """Prepare rows that are not prepared yet. Raises as the call does."""
        if not rows or not isinstance(rows[0], Mapping) or _is_prepared(self.trainer, rows[0]):
            return rows
        if self.trainer.accelerator.num_processes > 1:
            raise ValueError(
                f"Rows with {sorted(rows[0])} are not prepared for the {type(self.trainer).__name__}, and a process "
                "cannot prepare them alone. Expected prepared rows with several processes. Call "
                "`hf_trak.data.preferences.prepared_rows(trainer, rows)` in all of them first."
            )
        with no_progress_bars():
            return list(prepared_rows(self.trainer, Dataset.from_list([dict(row) for row in rows])))


def _of_images(trainer: Any) -> bool:
    return bool(getattr(trainer, "_is_vision_dataset", False))


def _is_prepared(trainer: Any, columns: Any) -> bool:
    if _of_images(trainer):
        return True  # its collator makes tokens and pixels of rows as they are
    return set(PREPARED[str(kind_of(trainer))]) <= set(columns)


def prepared_rows(trainer: Any, rows: Any) -> Any:
    """Make tokens of rows as people have them, by the trainer's own preparation.

    Args:
        trainer: a trainer of preferences, rewards or policies of TRL.
        rows (`datasets.Dataset`): `prompt`, `chosen` and `rejected`, or `prompt`, `completion` and what belongs to it,
            as text or messages. Prepared rows are returned as they are.

    Returns:
        The rows with columns of tokens.

    Raises:
        ValueError: the trainer is another one, a column is missing, or the preparation leaves rows out or makes two of
            one.
    """
    kind = kind_of(trainer)
    if kind is None:
        raise ValueError(
            f"`trainer` is a {type(trainer).__name__}. Expected a trainer of preferences, rewards or policies of TRL: "
            f"{', '.join(PREPARED)}."
        )
    names = list(getattr(rows, "column_names", None) or sorted(rows[0]))
    if _is_prepared(trainer, names):
        return rows
    wanted = ("chosen", "rejected") if PREPARED[kind][0].startswith("chosen") else ("completion",)
    missing = [name for name in wanted if name not in names]
    if missing and not (kind == "KTOTrainer" and "chosen" in names):
        raise ValueError(
            f"The rows have the columns {names}, and neither {missing} nor {list(PREPARED[kind])}. Expected the "
            f"columns that the {kind} was given, as text or messages, or its own columns of tokens."
        )
    made = _PREPARATIONS[kind](trainer, rows)
    if len(made) != len(rows):
        raise ValueError(
            f"The {kind} makes {len(made)} rows of {len(rows)}: it leaves out rows that `max_length` cuts off, and "
            "KTO's takes pairs apart. Expected one row for each. Leave such rows out before, or prepare them with "
            "`trl.unpair_preference_dataset`."
        )
    return made


def _by_trainer(trainer: Any, rows: Any) -> Any:
    return trainer._prepare_dataset(rows, trainer.processing_class, trainer.args, "eval")


def _for_orpo(trainer: Any, rows: Any) -> Any:
    from trl import maybe_apply_chat_template, maybe_extract_prompt  # whose trainer is at hand

    rows = rows.map(maybe_extract_prompt)
    rows = rows.map(maybe_apply_chat_template, fn_kwargs={"processing_class": trainer.processing_class})
    return rows.map(trainer.tokenize_row)


def _for_policy(trainer: Any, rows: Any) -> Any:
    """Tokenize rollouts as the trainer tokenizes prompts. The end of a completion is the token that ends a text."""
    tokenizer = getattr(trainer.processing_class, "tokenizer", trainer.processing_class)

    def tokenized(row: Mapping[str, Any]) -> dict[str, list[int]]:
        prompt, completion = row.get("prompt", ""), row["completion"]
        if isinstance(prompt, str):
            answer = tokenizer(completion, add_special_tokens=False)["input_ids"]
            if tokenizer.eos_token is not None and not completion.endswith(tokenizer.eos_token):
                answer = [*answer, tokenizer.eos_token_id]
            return {"prompt_ids": tokenizer(prompt)["input_ids"], "completion_ids": answer}
        before = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=True)["input_ids"]
        whole = tokenizer.apply_chat_template([*prompt, *completion], return_dict=True)["input_ids"]
        if whole[: len(before)] != before:
            raise ValueError(
                "The tokens of a prompt are not the beginning of those of prompt and completion, under this chat "
                "template. Expected rollouts with their own tokens. Store `prompt_ids` and `completion_ids`."
            )
        return {"prompt_ids": before, "completion_ids": whole[len(before) :]}

    return rows.map(tokenized)


_PREPARATIONS: dict[str, Callable[[Any, Any], Any]] = {
    **dict.fromkeys(("DPOTrainer", "RewardTrainer", "KTOTrainer"), _by_trainer),
    **dict.fromkeys(("GRPOTrainer", "RLOOTrainer"), _for_policy),
    "ORPOTrainer": _for_orpo,
}


def training_rows(trainer: Any, given: Any = None) -> Any:
    """Return the training rows of a trainer of preferences, or prepare rows that are given instead.

    Args:
        trainer: the trainer.
        given: rows in place of those of the trainer: rollouts, for a trainer of policies.

    Raises:
        ValueError: a trainer of policies without rollouts, and what [`prepared_rows`] raises.
    """
    kind = kind_of(trainer)
    if given is not None:
        return given if kind is None else prepared_rows(trainer, given)
    if kind is None:  # whose rows may be of any kind
        return trainer.train_dataset
    names = trainer.train_dataset.column_names
    if kind in ("GRPOTrainer", "RLOOTrainer") and not {"completion", "completion_ids"} & set(names):
        raise ValueError(
            f"The training dataset of the {kind} has the columns {names}: prompts, and no rollouts. Expected "
            "`prompt`, `completion` and `advantage` of every rollout. Store them during the training, and pass "
            "`train_dataset=rollouts`."
        )
    return prepared_rows(trainer, trainer.train_dataset)
