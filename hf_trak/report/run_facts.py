"""Facts of a run that a report shows: model, checkpoints, projection, ridge, sizes and versions."""

import functools
import json
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from hf_trak.featurize.featurized import FeaturizedModel
from hf_trak.version import __version__

_SPARE_DEPTH = 50  # a margin, since a value that can just be written here cannot be read from a deeper call stack


def known_facts(attributor: FeaturizedModel) -> dict[str, Any]:
    """Collect the facts that are known from the store and the configuration."""
    config = attributor.store.config
    args = attributor.args
    return {
        "model": config.get("model_name") or config.get("model_class"),
        "model_class": config.get("model_class"),
        "model_revision": config.get("model_revision"),
        "task": config.get("task"),
        "parameters": attributor.layout.total,
        "checkpoints": [
            Path(str(attributor.store.checkpoint_info(i)["source"])).name for i in attributor.store.model_ids
        ],
        "projection": config.get("projection"),
        "features": attributor.proj_dim,
        "ridge": f"{args.lambda_reg:g}" if args.lambda_reg is not None else f"{args.lambda_relative:g} relative",
        "seed": args.seed,
        "train_rows": len(attributor.train_dataset),
        "train_fingerprint": config.get("train_fingerprint"),
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "hf_trak_version": __version__,
    }


def plain_facts(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Convert facts to plain JSON, in their order.

    Values that JSON does not have become text: NaN and infinities (`"NaN"`), and objects of other classes (as by
    `str`).

    Raises:
        ValueError: a fact contains itself, is nested too deeply, or has keys that are neither strings nor numbers.
    """
    plain = {}
    for name, value in facts.items():
        try:
            json.dumps(functools.reduce(lambda inner, _: [inner], range(_SPARE_DEPTH), value), default=str)
            plain[str(name)] = json.loads(json.dumps(value, default=str), parse_constant=str)
        except (TypeError, ValueError, RecursionError) as error:
            raise ValueError(
                f"The fact {str(name)[:80]!r} cannot be saved as JSON: {str(error)[:200]}. Expected plain values, "
                "lists and dictionaries. Convert it, or leave it out."
            ) from error
    return plain
