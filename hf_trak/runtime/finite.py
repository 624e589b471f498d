"""Checks that gradients, features and scores are finite, with errors that name the row."""

import math
from collections.abc import Sequence

from torch import Tensor

from hf_trak.errors import NonFiniteError

INSPECT = (
    "Inspect that example and the checkpoint's weights, or take gradients in float32 (float16 overflows above 65504)."
)


def non_finite_rows(values: Tensor) -> list[int]:
    """Find the rows that hold a NaN or an infinity.

    Args:
        values (`torch.Tensor` of shape `(rows, ...)`):
            Rows of any real dtype.

    Returns:
        `list[int]`: their indices, ascending; empty if every value is finite.
    """
    # A NaN or an infinity makes the sum one. So may large finite numbers, whose rows are then looked at one by one.
    if math.isfinite(values.sum().item()):
        return []
    finite = values.isfinite().reshape(values.shape[0], -1).all(dim=1)
    return (~finite).nonzero().flatten().tolist()


def check_finite_rows(
    values: Tensor, what: str, rows: int | Sequence[int] = 0, *, unit: str = "row", remedy: str = INSPECT
) -> None:
    """Check that every value is finite.

    Args:
        values (`torch.Tensor` of shape `(rows, ...)`):
            Rows of any real dtype.
        what (`str`):
            What a row is, such as `"projected gradient"`, for the message.
        rows (`int` or `Sequence[int]`, *optional*, defaults to 0):
            Number of the first row, or the numbers of all of them, for the message.
        unit (`str`, *optional*, defaults to `"row"`):
            What the number counts, such as `"sample"`, for the message.
        remedy (`str`, *optional*):
            The sentence of the message that says what to do.

    Raises:
        NonFiniteError: a value is NaN or infinite; names the first such row and says how many more there are.
    """
    bad = non_finite_rows(values)
    if bad:
        number = rows + bad[0] if isinstance(rows, int) else rows[bad[0]]
        more = f" (and of {len(bad) - 1} more of these {values.shape[0]})" if len(bad) > 1 else ""
        raise NonFiniteError(
            f"The {what} of {unit} {number}{more} is NaN or infinite. Expected finite numbers. {remedy}"
        )
