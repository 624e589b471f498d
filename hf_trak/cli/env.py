"""`hf-trak env`: print versions, for a bug report."""

import importlib.metadata
import os
import platform
import sys
from collections.abc import Sequence

from hf_trak.cli.parser import OutputArguments, answer, parse_yaml_and_args, table
from hf_trak.hub.access import address_without_secrets
from hf_trak.version import __version__

_PACKAGES = (
    "torch", "transformers", "datasets", "accelerate", "huggingface_hub", "safetensors", "peft", "open_clip_torch",
    "numpy", "pyarrow", "scipy", "jinja2", "pillow", "matplotlib",
)  # fmt: skip
_VARIABLES = ("HF_HUB_OFFLINE", "HF_ENDPOINT", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "WORLD_SIZE")


def run(argv: Sequence[str]) -> None:
    """Print versions, without paths, tokens, or passwords in addresses."""
    (output,) = parse_yaml_and_args(
        OutputArguments, argv, prog="hf-trak env", description="Print versions, to be pasted into a bug report."
    )
    content = {"hf_trak": __version__, "python": sys.version.split()[0], "platform": platform.platform()}
    for name in _PACKAGES:
        try:
            content[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            content[name] = "not installed"
    import torch

    content["cpus"] = str(os.cpu_count())
    content["cuda"] = str(torch.version.cuda)
    devices = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    content["gpus"] = ", ".join(devices) or "none"
    content |= {name: address_without_secrets(os.environ[name]) for name in _VARIABLES if name in os.environ}
    answer(content, table(content), output.json)
