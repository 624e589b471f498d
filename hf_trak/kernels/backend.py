"""The choice of the backend: the CUDA kernels of this package or torch operators. Both compute the same map."""

import os

import torch

VARIABLE = "HF_TRAK_BACKEND"
TERMS_VARIABLE = "HF_TRAK_FLOAT32_TERMS"
WGMMA_VARIABLE = "HF_TRAK_WGMMA"
_NAMES = ("auto", "cuda", "torch")


def kernels_wanted(device: torch.device) -> bool:
    """Tell whether the CUDA kernels project tensors on `device`.

    They do on every NVIDIA GPU, unless the environment variable `HF_TRAK_BACKEND` is `torch`. Its other values,
    `auto` and `cuda`, change nothing. torch's builds for AMD GPUs, which call their devices `cuda` too, use torch
    operators.

    Raises:
        ValueError: the variable has another value.
    """
    name = os.environ.get(VARIABLE, "auto")
    if name not in _NAMES:
        raise ValueError(f"The environment variable {VARIABLE} is '{name}'. Expected one of {', '.join(_NAMES)}.")
    return device.type == "cuda" and name != "torch" and torch.version.hip is None


def float32_terms() -> int:
    """Read the number of bfloat16 terms of a float32 gradient on tensor cores: `HF_TRAK_FLOAT32_TERMS`, 2 or 1.

    Two keep the relative error of a projection below 10⁻⁵; one halves the time and rounds gradients to bfloat16.

    Raises:
        ValueError: the variable has another value.
    """
    terms = os.environ.get(TERMS_VARIABLE, "2")
    if terms not in ("1", "2"):
        raise ValueError(f"The environment variable {TERMS_VARIABLE} is '{terms}'. Expected 1 or 2.")
    return int(terms)


def wgmma_wanted() -> bool:
    """Tell whether Hopper GPUs use their own matrix instructions; with `HF_TRAK_WGMMA=0` they use those of all GPUs.

    Raises:
        ValueError: the variable is neither 0 nor 1.
    """
    value = os.environ.get(WGMMA_VARIABLE, "1")
    if value not in ("0", "1"):
        raise ValueError(f"The environment variable {WGMMA_VARIABLE} is '{value}'. Expected 0 or 1.")
    return value == "1"
