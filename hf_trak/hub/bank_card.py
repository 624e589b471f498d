"""The dataset card of a published bank."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from hf_trak.evaluation.bank import Bank, BankPart
from hf_trak.evaluation.intervals import RESAMPLES
from hf_trak.hub.cards import render_card
from hf_trak.hub.redaction import without_secrets

_FEWEST_SUBSETS = 3
"""Subsets that the agreement of repeats can be measured with."""


def bank_facts(bank: Bank, described: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Collect what the card says of a bank, the highest possible scores included.

    Args:
        bank: the bank.
        described: content of `bank.json`.
        names: the parts that are published, all of them complete.

    Raises:
        ImportError: scipy is not installed.
        StoreError: a file is damaged.
    """
    return {
        "rows": f"{bank.n_train:,}",
        "rows_fingerprint": described["rows_fingerprint"],
        "targets": f"{bank.n_targets:,}",
        "targets_fingerprint": described["targets_fingerprint"],
        "recipe": [[name, without_secrets(_text(value))] for name, value in sorted(bank.recipe.items())],
        "parts": [_part_row(bank, bank.part(name), names) for name in names],
        "about": bank.recipe.get("title"),
    }


def bank_card(repo_id: str, facts: Mapping[str, Any]) -> str:
    """Write the card of a bank.

    Args:
        repo_id: the dataset repo, for the examples in the card.
        facts: the result of [`bank_facts`].
    """
    about = facts["about"]
    title = f"Bank of retrained models: {about}" if isinstance(about, str) and about else "Bank of retrained models"
    usage = "\n".join(
        [
            "import numpy as np",
            "from hf_trak.evaluation import evaluate_bank",
            "from hf_trak.hub import load_bank",
            "",
            f'bank = load_bank("{repo_id}")',
            'scores = np.load("scores.npy")  # (training rows, targets); higher means more helpful',
            'for result in evaluate_bank(bank, {"mine": scores}):',
            "    print(result.part, result.lds, result.ceilings)",
        ]
    )
    values = {**facts, "repo_id": repo_id, "cite_as": repo_id.replace("/", "-")}
    # The files hold tensors, which the Hub's viewer of rows cannot show.
    return render_card("bank", title, usage, values, {"pretty_name": title, "viewer": False})


def _part_row(bank: Bank, part: BankPart, names: Sequence[str]) -> dict[str, Any]:
    repeats, subsets = part.outputs.shape[:2]
    if part.repeat_of is not None:
        purpose = f"repeats {part.repeat_of}"
    else:
        purpose = "judges scores" if part.removal is None else "removals"
    return {
        "name": part.name,
        "purpose": purpose,
        "subsets": subsets,
        "repeats": repeats,
        "dropped": _dropped(part.masks),
        "protocol": ", ".join(f"{key} {_text(value)}" for key, value in sorted(part.protocol.items())) or "not told",
        "ceilings": "; ".join(_ceilings(bank, part, names)) or "not measured",
    }


def _dropped(masks: np.ndarray) -> str:
    """The share of rows that the subsets lack, or its range."""
    shares = 100 * (1 - masks.mean(axis=1))
    ends = list(dict.fromkeys(f"{end:.3g}" for end in (shares.min(), shares.max())))
    return f"{' to '.join(ends)} %"


def _ceilings(bank: Bank, part: BankPart, names: Sequence[str]) -> list[str]:
    """The highest possible scores on a part, by the published parts that tell the noise."""
    if part.repeat_of is not None or part.removal is not None:
        return []
    repeats = [name for name in bank.parts if bank.description(name)["repeat_of"] == part.name]
    if any(bank.description(name)["subsets"] < _FEWEST_SUBSETS for name in (part.name, *repeats)):
        return []
    found = bank.reliability(part.name, resamples=RESAMPLES)
    own = [f"{found[part.name].ceiling} by its own repeats"] if part.name in found else []
    return own + [f"{found[name].ceiling_of_one} by {name}" for name in repeats if name in found and name in names]


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
