"""Rows of TRL's `SFTTrainer` as people have them: texts, messages, prompts with completions.

The trainer makes tokens of its training rows when it is built. Targets come later, and go through the same preparation
here: its chat template, its `formatting_func`, its limit of tokens, and what of a row it trains on.
"""

from collections.abc import Mapping
from typing import Any

from datasets import Dataset

from hf_trak.data.progress_bars import no_progress_bars
from hf_trak.data.rows import Collator
from hf_trak.data.text_columns import TextColumns, is_embedding_trainer
from hf_trak.data.text_pairs import PairColumns, is_pair_trainer
from hf_trak.data.trainer_columns import ColumnsCollator, signature_columns, trainer_collator

_TOKENS = "input_ids"
_RAW = ("messages", "conversations", "prompt", "completion", "tools", "chat_template_kwargs")


class SFTCollator(ColumnsCollator):
    """The collator of an `SFTTrainer`, which also takes rows that are not tokens yet."""

    def __init__(self, trainer: Any) -> None:
        """
        Args:
            trainer: a `trl.SFTTrainer` of texts.
        """
        names = dict.fromkeys([*signature_columns(trainer), trainer.args.dataset_text_field, *_RAW])
        super().__init__(trainer.data_collator, tuple(names))
        self.trainer = trainer
        self.every_column = trainer._formatting_func is not None  # which may read any of them

    def __call__(self, rows: list[Any]) -> Any:
        """Collate rows into a batch. Raises as [`ready`] does."""
        return self.collator(self.ready(rows))

    def ready(self, rows: list[Any]) -> list[Any]:
        """Return rows of tokens, which they may be already.

        Raises:
            ValueError: the preparation leaves rows out, or several processes would have to prepare them together.
        """
        if not rows or not isinstance(rows[0], Mapping) or _TOKENS in rows[0]:
            return rows
        trainer = self.trainer
        if trainer.accelerator.num_processes > 1:
            raise ValueError(
                f"Rows with {sorted(rows[0])} are no tokens yet, and one of {trainer.accelerator.num_processes} "
                "processes cannot prepare them alone. Expected rows with `input_ids`. Give the trainer these rows as "
                "`eval_dataset`, and pass `trainer.eval_dataset`."
            )
        with no_progress_bars():
            given = Dataset.from_list([dict(row) for row in rows])
            made = trainer._prepare_dataset(
                given, trainer.processing_class, trainer.args, False, trainer._formatting_func, "eval"
            )
        if len(made) != len(rows):
            raise ValueError(
                f"The {type(trainer).__name__} makes {len(made)} rows of {len(rows)}. Expected one for each. Leave "
                "out rows that its `max_length` drops."
            )
        return list(made)


def collator_of(trainer: Any) -> Collator:
    """Return the data collator of a trainer, which takes raw rows where the trainer knows how to prepare them.

    Args:
        trainer: a `transformers.Trainer`.
    """
    if is_embedding_trainer(trainer):
        return TextColumns(trainer)
    if is_pair_trainer(trainer):
        return PairColumns(trainer)
    own = any(cls.__name__ == "SFTTrainer" and cls.__module__.startswith("trl.") for cls in type(trainer).__mro__)
    if own and not trainer._is_vision_dataset and hasattr(trainer, "_formatting_func"):
        return SFTCollator(trainer)
    return trainer_collator(trainer)
