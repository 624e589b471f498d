"""Which backend computes a projection: the kernels of this package or torch operators. Both compute the same map."""

import os

import torch

VARIABLE = "HF_TRAK_BACKEND"
TERMS_VARIABLE = "HF_TRAK_FLOAT32_TERMS"
WGMMA_VARIABLE = "HF_TRAK_WGMMA"
_NAMES = ("auto", "cuda", "torch")


def kernels_wanted(device: torch.device) -> bool:
    """Whether tensors on `device` are projected by the CUDA kernels.

    They are on every NVIDIA GPU, unless the environment variable `HF_TRAK_BACKEND` is `torch`. Its other values,
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
    """How many bfloat16 terms the tensor cores make of a float32 gradient: `HF_TRAK_FLOAT32_TERMS`, 2 or 1.

    Two keep the relative error of a projection below 10⁻⁵; one halves the time and rounds gradients to bfloat16.

    Raises:
        ValueError: the variable has another value.
    """
    terms = os.environ.get(TERMS_VARIABLE, "2")
    if terms not in ("1", "2"):
        raise ValueError(f"The environment variable {TERMS_VARIABLE} is '{terms}'. Expected 1 or 2.")
    return int(terms)


def wgmma_wanted() -> bool:
    """Whether Hopper GPUs multiply by their own instructions, unless `HF_TRAK_WGMMA` is 0: then by those of all GPUs.

    Raises:
        ValueError: the variable has another value than 0 or 1.
    """
    value = os.environ.get(WGMMA_VARIABLE, "1")
    if value not in ("0", "1"):
        raise ValueError(f"The environment variable {WGMMA_VARIABLE} is '{value}'. Expected 0 or 1.")
    return value == "1"
