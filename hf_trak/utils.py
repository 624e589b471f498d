"""Import path of the utilities in the `trak` API. Their code is in `products` and `utils` of `hf_trak.traker`."""

from hf_trak.traker.score_computers.basic import (
    get_free_memory,
    get_matrix_mult,
    get_matrix_mult_blockwise,
    get_matrix_mult_standard,
    get_output_memory,
)
from hf_trak.traker.utils import (
    get_num_params,
    get_parameter_chunk_sizes,
    is_not_buffer,
    parameters_to_vector,
    test_install,
    vectorize,
)

__all__ = [
    "get_free_memory",
    "get_matrix_mult",
    "get_matrix_mult_blockwise",
    "get_matrix_mult_standard",
    "get_num_params",
    "get_output_memory",
    "get_parameter_chunk_sizes",
    "is_not_buffer",
    "parameters_to_vector",
    "test_install",
    "vectorize",
]
