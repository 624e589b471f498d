"""The projectors of the `trak` API show the matrix that they multiply by."""

import pytest
import torch
from rounding import assert_within, product_bound

from hf_trak.projectors import BasicProjector, BasicSingleBlockProjector


@pytest.mark.parametrize("proj_type", ["rademacher", "normal"])
@pytest.mark.parametrize("block_size", [1, 7, 100])
def test_sketch_matrix_is_the_one_that_projects(proj_type: str, block_size: int) -> None:
    grads = torch.randn(3, 50)
    blocks = BasicProjector(50, 20, 5, proj_type, "cpu", block_size=block_size, model_id=2)
    whole = BasicSingleBlockProjector(50, 20, 5, proj_type, "cpu", model_id=2)
    states = blocks.get_generator_states()
    assert len(states) == -(-20 // block_size)
    matrix = torch.cat([blocks.generate_sketch_matrix(state) for state in states], dim=1)
    assert torch.equal(matrix, whole.generate_sketch_matrix())
    for projector in (blocks, whole):
        # sums of 50 products
        features = projector.project(grads, 2)
        assert features.dtype == torch.float32
        assert_within(features, grads.double() @ matrix.double(), product_bound(grads, matrix))
        assert not torch.allclose(projector.project(grads, 3), grads @ matrix, atol=0.1)
