"""What people train with: each case makes a model, its rows and its collator, as a user would."""

from ecosystem_cases.adapters import ADAPTERS
from ecosystem_cases.case import EcosystemCase
from ecosystem_cases.corners import CORNERS
from ecosystem_cases.embeddings import EMBEDDINGS
from ecosystem_cases.images import IMAGES
from ecosystem_cases.language import LANGUAGE
from ecosystem_cases.others import OTHERS
from ecosystem_cases.own_losses import OWN_LOSSES
from ecosystem_cases.preference_trainers import PREFERENCES
from ecosystem_cases.sft import SFT
from ecosystem_cases.transformers_tasks import TASKS
from ecosystem_cases.wrapped import WRAPPED

GROUPS: dict[str, tuple[EcosystemCase, ...]] = {
    "Trainer and its collators": TASKS,
    "Losses of one's own": OWN_LOSSES,
    "TRL": (*SFT, *PREFERENCES),
    "sentence-transformers": EMBEDDINGS,
    "PEFT": ADAPTERS,
    "Families of models": LANGUAGE,
    "Images": IMAGES,
    "Speech, segmentation, diffusion": OTHERS,
    "Wrappers and loops": WRAPPED,
    "Quantized, random, refused": CORNERS,
}
"""Cases by the heading of their table."""
