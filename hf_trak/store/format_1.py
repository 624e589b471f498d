"""A warning about stores of format 1, which earlier versions wrote, and the information that they do not record."""

import logging
from pathlib import Path

logger = logging.getLogger(__name__)

UNKNOWN = (
    "the id of a checkpoint in its shards",
    "settings of the model besides its weights",
    "the code of functions",
    "how rows are collated",
)

warned_directories: set[Path] = set()
"""Stores of format 1 that this process has opened."""


def warn_once(output_dir: Path) -> None:
    """Log what a store of format 1 cannot notice, the first time that this process opens it."""
    if output_dir.absolute() in warned_directories:
        return
    warned_directories.add(output_dir.absolute())
    logger.warning(
        "%s is of format 1. Its files are not protected against every kind of damage, and it does not record %s, so "
        "that a change of those is not noticed. `hf-trak upgrade --output_dir %s` (or "
        "`TrakAttributor.upgrade_store()`) checks it against model and rows, and brings it up to date.",
        output_dir,
        ", ".join(UNKNOWN),
        output_dir,
    )
