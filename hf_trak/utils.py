"""Functions that the `trak` API documents under `utils`."""

import functools
import tempfile
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from hf_trak.runtime.checks import required
from hf_trak.traker.score_computers import (
    get_free_memory,
    get_matrix_mult,
    get_matrix_mult_blockwise,
    get_matrix_mult_standard,
    get_output_memory,
)
from hf_trak.traker.traker import TRAKer

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

INT32_MAX = 2**31 - 1
_BUFFER_SUFFIXES = ("running_mean", "running_var", "num_batches_tracked")


def get_num_params(model: torch.nn.Module) -> int:
    """Count the elements of all parameters. Frozen parameters count, and shared ones count once.

    Args:
        model (`torch.nn.Module`):
            The model.

    Returns:
        `int`: number of elements.
    """
    return sum(parameter.numel() for parameter in model.parameters())


def get_parameter_chunk_sizes(model: torch.nn.Module, batch_size: int) -> tuple[int, list[int]]:
    """Cut the parameters into consecutive chunks such that chunk · `batch_size` fits into a signed 32-bit integer.

    Whole parameters are grouped as long as they fit. A parameter larger than the limit is cut at the limit. No chunk
    is empty or over the limit, and all chunks add up to [`get_num_params`].

    Args:
        model (`torch.nn.Module`):
            The model whose parameters are counted.
        batch_size (`int`):
            Number of gradients that are projected together.

    Returns:
        `tuple[int, list[int]]`: `max_chunk_size`, the limit, and `params_per_chunk`, the number of parameter elements
        in each chunk.

    Raises:
        ValueError: `batch_size` is not in [1, 2³¹ − 1].
    """
    if not 1 <= batch_size <= INT32_MAX:
        raise ValueError(f"`batch_size` is {batch_size}. Expected a number from 1 to {INT32_MAX}.")
    limit = INT32_MAX // batch_size
    chunks: list[int] = []
    current = 0
    for parameter in model.parameters():
        if current and current + parameter.numel() > limit:
            chunks.append(current)
            current = 0
        current += parameter.numel()
        while current > limit:
            chunks.append(limit)
            current -= limit
    if current:
        chunks.append(current)
    return limit, chunks


def is_not_buffer(ind: int, params_dict: Mapping[int, str] | Sequence[str]) -> bool:
    """Tell whether an entry of a state dict is a parameter, and not a running statistic of a normalization layer.

    Args:
        ind (`int`):
            Key or position of the entry.
        params_dict (`Mapping[int, str]` or `Sequence[str]`):
            Names of the entries.

    Returns:
        `bool`: `True` for a parameter.
    """
    return not params_dict[ind].endswith(_BUFFER_SUFFIXES)


def parameters_to_vector(parameters: Iterable[Tensor]) -> Tensor:
    """Flatten and concatenate tensors. Unlike torch's own function, this one takes any memory layout.

    Args:
        parameters (iterable of `torch.Tensor`):
            The tensors.

    Returns:
        `torch.Tensor` of shape `(sum of sizes,)`.

    Raises:
        ValueError: no tensor was given.
    """
    flat = [parameter.reshape(-1) for parameter in parameters]
    if not flat:
        raise ValueError("There are no parameters to concatenate. Expected at least one tensor.")
    return torch.cat(flat)


def vectorize(g: Mapping[str, Tensor], arr: Tensor | None = None, device: torch.device | str = "cuda") -> Tensor:
    """Flatten per-sample gradients, and concatenate them in the order of the mapping.

    Args:
        g (`Mapping[str, torch.Tensor]`):
            Gradients of shape `(B, *shape)` by parameter name.
        arr (`torch.Tensor` of shape `(B, P)`, *optional*):
            Tensor to fill. By default a new one is made, in the widest dtype of the gradients.
        device (`torch.device` or `str`, *optional*, defaults to `"cuda"`):
            Where a new tensor is made.

    Returns:
        `torch.Tensor` of shape `(B, P)`; `arr` if it was given.

    Raises:
        ValueError: `g` is empty, its entries differ in B, or `arr` does not have the shape `(B, P)`.
    """
    if not g:
        raise ValueError(
            "There are no gradients to concatenate. Expected a mapping of parameter names to tensors (B, *shape)."
        )
    batch_sizes = {name: gradient.shape[0] if gradient.ndim else None for name, gradient in g.items()}
    if len(set(batch_sizes.values())) != 1 or None in batch_sizes.values():
        raise ValueError(f"The gradients have the batch sizes {batch_sizes}. Expected the same for all.")
    batch = next(iter(g.values())).shape[0]
    flat = {name: gradient.detach().reshape(batch, gradient.shape[1:].numel()) for name, gradient in g.items()}
    total = sum(gradient.shape[1] for gradient in flat.values())
    if arr is None:
        dtype = functools.reduce(torch.promote_types, (gradient.dtype for gradient in g.values()))
        arr = torch.empty(batch, total, dtype=dtype, device=device)
    elif arr.shape != (batch, total):
        raise ValueError(f"`arr` has shape {tuple(arr.shape)}. Expected ({batch}, {total}).")
    start = 0
    for gradient in flat.values():
        arr[:, start : start + gradient.shape[1]] = gradient.to(arr.device)
        start += gradient.shape[1]
    return arr


def test_install(use_fast_jl: bool = True) -> None:
    """Run TRAK from end to end on a tiny model, and print that it works.

    Args:
        use_fast_jl (`bool`, *optional*, defaults to `True`):
            Also call the CUDA kernels of the optional package `fast_jl`. With `False`, everything runs on the CPU.

    Raises:
        ModuleNotFoundError: `use_fast_jl` is set, and the package is not installed.
        RuntimeError: `fast_jl` has no GPU to run on, or a result is wrong.
    """
    if use_fast_jl:
        _check_fast_jl()

    n, m, k = 24, 4, 8
    generator = torch.Generator().manual_seed(0)
    images, labels = torch.randn(n, 1, 8, 8, generator=generator), torch.arange(n) % 10
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
    with tempfile.TemporaryDirectory() as directory:
        traker = TRAKer(
            model=model,
            task="image_classification",
            train_set_size=n,
            save_dir=directory,
            device="cpu",
            proj_dim=k,
            use_half_precision=False,
        )
        traker.load_checkpoint(model.state_dict(), model_id=0)
        traker.featurize(batch=(images, labels), num_samples=n)
        traker.finalize_features()
        traker.start_scoring_checkpoint("install", model.state_dict(), model_id=0, num_targets=m)
        traker.score(batch=(images[:m], labels[:m]), num_samples=m)
        scores = torch.as_tensor(traker.finalize_scores("install"))
    if scores.shape != (n, m) or not bool(scores.isfinite().all()) or not bool((scores[range(m), range(m)] > 0).all()):
        raise RuntimeError(
            f"TRAK ran, but its scores, of shape {tuple(scores.shape)}, are wrong. Expected ({n}, {m}) finite "
            "numbers, positive between an example and itself. Please report this with the versions of hf_trak and "
            "torch."
        )
    print("hf_trak is installed correctly." + (" fast_jl works." if use_fast_jl else ""))


def _check_fast_jl() -> None:
    message = (
        "fast_jl is not installed. It needs a GPU and the CUDA toolkit: `pip install fast-jl`. Nothing else in "
        "hf_trak needs it: check the installation with `test_install(use_fast_jl=False)`."
    )
    fast_jl = required("fast_jl", message)
    if not torch.cuda.is_available():
        raise RuntimeError(
            "fast_jl is installed, but torch sees no CUDA device. Check the driver, or run "
            "`test_install(use_fast_jl=False)`, which needs none."
        )
    device = torch.device("cuda", torch.cuda.current_device())
    multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
    ones = torch.ones(8, 1000, device=device)
    projected = fast_jl.project_rademacher_8(ones, 512, 0, multiprocessors)
    if projected.shape != (8, 512) or not bool(projected.isfinite().all()) or not bool(projected.any()):
        raise RuntimeError(
            "fast_jl gave a wrong result for a tiny projection. Rebuild it for this GPU (`TORCH_CUDA_ARCH_LIST`), or "
            "use another projector."
        )
