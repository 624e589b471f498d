"""The checks of integers and of finite rows that the whole library shares."""

import numpy as np
import pytest
import torch

from hf_trak.errors import NonFiniteError
from hf_trak.runtime.checks import check_finite_rows, checked_int, is_int, non_finite_rows

INTEGERS = [3, np.int64(3), np.uint8(3), torch.tensor(3), torch.tensor([3])]
NO_INTEGERS = [True, False, np.True_, torch.tensor(True), 3.0, np.float32(3), torch.tensor(3.0), "3", None, [3]]


@pytest.mark.parametrize("value", INTEGERS)
def test_integers_of_every_library_are_integers(value):
    assert is_int(value) and is_int(value, 3, 3)
    checked = checked_int(value, "n", 0)
    assert type(checked) is int and checked == 3


@pytest.mark.parametrize("value", NO_INTEGERS, ids=repr)
def test_bools_and_floats_are_no_integers(value):
    assert not is_int(value)
    with pytest.raises(TypeError, match=r"`n` is .*Expected an integer of at least 0\."):
        checked_int(value, "n", 0)
    with pytest.raises(ValueError, match=r"`n` is .*Expected an integer\. Count them\."):
        checked_int(value, "n", remedy="Count them.", type_error=ValueError)


def test_both_ends_of_a_range_are_in_it():
    assert [is_int(value, 1, 3) for value in range(5)] == [False, True, True, True, False]
    assert checked_int(1, "n", 1, 3) == 1 and checked_int(3, "n", 1, 3) == 3
    for value in (0, 4):
        with pytest.raises(ValueError, match=rf"`n` is {value}\. Expected an integer from 1 to 3\."):
            checked_int(value, "n", 1, 3)
    with pytest.raises(ValueError, match=r"`n` is 4\. Expected an integer of at most 3\."):
        checked_int(4, "n", maximum=3)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("shape", [(6,), (6, 4), (6, 2, 3)])
def test_rows_that_are_not_finite_are_found(bad, shape):
    values = torch.zeros(shape)
    assert non_finite_rows(values) == []
    values[2].fill_(bad)
    values[4].fill_(-bad)
    assert non_finite_rows(values) == [2, 4]
    with pytest.raises(NonFiniteError, match=r"The score of row 102 \(and of 1 more of these 6\) is NaN or infinite"):
        check_finite_rows(values, "score", 100)
    with pytest.raises(NonFiniteError, match=r"The score of sample 7 \(.*\. Look at it\.$"):
        check_finite_rows(values, "score", [9, 8, 7, 6, 5, 4], unit="sample", remedy="Look at it.")


def test_large_finite_rows_are_finite_though_their_sum_is_not():
    values = torch.full((3, 4), torch.finfo(torch.float32).max)
    assert values.sum().isinf()
    assert non_finite_rows(values) == []
    check_finite_rows(values, "score")


def test_empty_rows_are_finite():
    check_finite_rows(torch.zeros(3, 0), "score")
    check_finite_rows(torch.zeros(0, 3), "score")
