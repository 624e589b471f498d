"""The columns that a `Trainer` gives to its data collator, which trainers of other libraries choose themselves."""

from typing import Any

from hf_trak.data.rows import Collator, forward_columns


class ColumnsCollator:
    """A data collator with the names of the dataset columns that it needs, whatever the model's `forward` takes."""

    def __init__(self, collator: Collator, columns: tuple[str, ...]) -> None:
        """
        Args:
            collator: the data collator.
            columns: names of columns.
        """
        self.collator = collator
        self.columns = columns

    def __call__(self, rows: list[Any]) -> Any:
        """Collate rows into a batch."""
        return self.collator(rows)


def signature_columns(trainer: Any) -> tuple[str, ...]:
    """List the columns that a trainer keeps: the inputs of the model's `forward`, or those that the trainer names.

    TRL's trainers name columns from which their collators make the model's inputs: images and messages, or pairs of
    answers (`chosen_ids`, `rejected_ids`).

    Args:
        trainer: a `transformers.Trainer`. It keeps the list for itself, as at the start of a training.
    """
    choose = getattr(trainer, "_set_signature_columns_if_needed", None)
    if choose is None:
        return ()
    choose()
    return tuple(getattr(trainer, "_signature_columns", None) or ())


def trainer_collator(trainer: Any) -> Collator:
    """Return the data collator of a trainer, together with the columns that it needs beside those of `forward`.

    Args:
        trainer: a `transformers.Trainer`.
    """
    own = signature_columns(trainer)
    if set(own) <= set(forward_columns(trainer.model, trainer.args.label_names)):
        return trainer.data_collator
    return ColumnsCollator(trainer.data_collator, own)
