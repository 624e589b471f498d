"""Which training examples made your model do this? TRAK data attribution for the Hugging Face ecosystem."""

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_EXPORTS = {
    "ImageTextCollator": "hf_trak.image_text",
    "StreamedRows": "hf_trak.streams",
    "TRAKer": "hf_trak.traker",
    "TrakAttributor": "hf_trak.attributor",
    "TrakConfig": "hf_trak.config",
    "per_sample_gradients": "hf_trak.gradient_computers",
}

__all__ = [
    "ImageTextCollator",
    "StreamedRows",
    "TRAKer",
    "TrakAttributor",
    "TrakConfig",
    "__version__",
    "per_sample_gradients",
]

if TYPE_CHECKING:
    from hf_trak.attributor import TrakAttributor
    from hf_trak.config import TrakConfig
    from hf_trak.gradient_computers import per_sample_gradients
    from hf_trak.image_text import ImageTextCollator
    from hf_trak.streams import StreamedRows
    from hf_trak.traker import TRAKer


def __getattr__(name: str) -> Any:
    """Import public names on first use, so that `import hf_trak` is quick."""
    if name not in _EXPORTS:
        raise AttributeError(f"module 'hf_trak' has no attribute {name!r}")
    return getattr(importlib.import_module(_EXPORTS[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
