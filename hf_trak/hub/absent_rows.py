"""Working without the training rows of an index: a placeholder for them, and a collator for targets."""

from typing import Any, NoReturn

from torch.utils.data import default_collate as torch_collate
from transformers import default_data_collator

from hf_trak.data.model_inputs import check_rows
from hf_trak.data.rows import Collator, default_collator
from hf_trak.errors import IncompleteStoreError
from hf_trak.hub.remote_rows import RemoteRows


class AbsentRows:
    """Placeholder for training rows that are not available: it knows their number, not their content."""

    absent = True
    """Tells the featurizer that no row can be computed again and compared with stored features."""

    def __init__(self, count: int, name: str, remote: RemoteRows | None = None) -> None:
        """
        Args:
            count: number of rows.
            name: name of the index, for messages.
            remote: the rows in the dataset repo that the index names, of which some can be fetched.
        """
        self.count = count
        self.name = name
        self.remote = remote

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> NoReturn:
        raise IncompleteStoreError(
            f"Training row {index} of the index {self.name} is needed, and the training dataset is not available. "
            "Expected it for exact scores, and for tasks that use training rows, such as CLIP. Pass "
            "`train_dataset=` to `from_pretrained`."
        )


def target_collator(processing_class: Any) -> Collator:
    """Return a collator that looks at the rows of the targets, since there are no training rows to choose one by."""

    def collate(batch: list[Any]) -> Any:
        check_rows(batch, default_data_collator)
        return torch_collate(batch) if isinstance(batch[0], tuple | list) else default_data_collator(batch)

    return collate if processing_class is None else default_collator(_EmptyMappings(), processing_class)


class _EmptyMappings:
    """Rows that are mappings, like those of a `datasets.Dataset`, for the choice of a collator."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {}
