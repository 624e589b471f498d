"""What a report says about a run beside its scores."""

import functools
import json
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from hf_trak.featurize.featurized import FeaturizedModel
from hf_trak.version import __version__

_SPARE_DEPTH = 50  # what can just be written here could not be read from deeper in the stack


def known_facts(attributor: FeaturizedModel) -> dict[str, Any]:
    """What the store and the configuration say about the scores."""
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
    """Facts as plain JSON, in their order.

    What JSON does not have becomes text: NaN and infinities (`"NaN"`), and objects of any other class, as `str` has
    them.

    Raises:
        ValueError: a fact refers to itself, is nested too deeply, or has keys that are no strings or numbers.
    """
    plain = {}
    for name, value in facts.items():
        try:
            json.dumps(functools.reduce(lambda inner, _: [inner], range(_SPARE_DEPTH), value), default=str)
            plain[str(name)] = json.loads(json.dumps(value, default=str), parse_constant=str)
        except (TypeError, ValueError, RecursionError) as error:
            raise ValueError(
                f"The fact {str(name)[:80]!r} cannot be saved as JSON: {str(error)[:200]}. Expected plain values, "
                "lists and dictionaries."
            ) from error
    return plain
