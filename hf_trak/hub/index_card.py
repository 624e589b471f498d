"""The dataset card of a published index."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_trak.config import BITS, TrakConfig
from hf_trak.featurize.calibration import Calibration, named
from hf_trak.featurize.converting import EXACT
from hf_trak.hub.cards import render_card
from hf_trak.hub.curvature_files import StoredCurvature
from hf_trak.hub.index_files import SCALE_BYTES
from hf_trak.hub.manifest import IndexManifest
from hf_trak.store.checkpoint_records import CODE_BITS
from hf_trak.store.codes import CodeFormat

if TYPE_CHECKING:  # imports all of featurizing
    from hf_trak.featurize.fidelity import Fidelity


@dataclass(frozen=True)
class PreparedIndex:
    """A store that was checked and described, to be uploaded or written into a directory.

    Attributes:
        config: the configuration as it is published.
        manifest: the manifest.
        curvatures: the curvatures by model id.
        files: every file but the card by its path: its content, or where it is.
        fidelity: how well its scores agree with exact ones, if that was measured.
        calibration: the method to take, if that was measured.
    """

    config: dict[str, Any]
    manifest: IndexManifest
    curvatures: dict[int, StoredCurvature]
    files: dict[str, bytes | Path]
    fidelity: "Fidelity | None"
    calibration: Calibration | None


def index_card(repo_id: str, index: PreparedIndex) -> str:
    """Write the card of an index.

    Args:
        repo_id: the dataset repo, for the example in the card.
        index: the index.
    """
    config, manifest = index.config, index.manifest
    settings, task = manifest.settings, config.get("task") or {}
    ridge = f"{settings.get('lambda_relative', TrakConfig().lambda_relative):g} · trace(XᵀX) / min(n, k)"
    name, revision = config.get("model_name"), config.get("model_revision")
    trained = manifest.train_dataset
    facts = {
        "train_size": f"{config['train_size']:,}",
        "train_fingerprint": config.get("train_fingerprint"),
        "train_dataset": _link(trained.name, "datasets/", trained.revision, trained.split) if trained else "not named",
        "model": _link(name, "", revision) if name else "not named; pass it as `model=`",
        "model_class": config.get("model_class"),
        "model_dtype": config.get("model_dtype"),
        "parameters": f"{sum(math.prod(shape) for _, shape, _ in config.get('parameters') or ()):,}",
        "task": str(task.get("class", "")).rpartition(".")[2],
        "task_settings": ", ".join(f"{key} = {value}" for key, value in (task.get("settings") or {}).items()),
        "proj_dim": f"{config['proj_dim']:,}",
        "feature_dtype": config["feature_dtype"],
        "storage": _storage(config, manifest),
        "format_version": config["format_version"],
        "first_bytes": _first_bytes(config),
        "projection": config.get("projection"),
        "proj_nonzeros": config.get("proj_nonzeros"),
        "seed": config.get("seed"),
        "ridge": ridge,
        "lds": manifest.lds,
        "fidelity": None if index.fidelity is None else _fidelity(index.fidelity),
        "calibration": None if index.calibration is None else _calibration(index.calibration),
        "checkpoints": _checkpoint_rows(manifest),
        "curvatures": _curvature_rows(index.curvatures),
    }
    usage = "\n".join(
        [
            "from hf_trak import TrakAttributor",
            "",
            f'attributor = TrakAttributor.from_pretrained("{repo_id}"{"" if name else ", model=model"})',
            "scored = attributor.attribute(my_examples, top_k=10)  # a datasets.Dataset with the columns of the model",
            'print(scored[0]["trak_indices"], scored[0]["trak_scores"])  # rows of the training set that helped most',
        ]
    )
    title = f"Attribution index of {name}" if name else "Attribution index"
    # The files hold tensors, which the Hub's viewer of rows cannot show.
    return render_card("index", title, usage, facts, {"pretty_name": title, "viewer": False})


def _storage(config: Mapping[str, Any], manifest: IndexManifest) -> str:
    """Describe the bytes of a row of features."""
    name = config["feature_dtype"]
    bits, k = BITS[name], int(config["proj_dim"])
    if name not in CODE_BITS:
        return f"{bits // 8 * k:,} bytes of {name}"
    size = CodeFormat(bits, k).row_bytes + SCALE_BYTES
    saved = f"{4 * k / size:.1f} times fewer than float32"
    how = f"rotation {config['rotation']}, levels {config['levels']}"
    text = f"{size:,} bytes: codes of {bits} bit{'s' * (bits > 1)} per number and a scale, {saved} ({how})"
    histories = {entry.converted_from for entry in manifest.checkpoints.values()} - {(), EXACT}
    steps = ", ".join(sorted(" to ".join(history) for history in histories))
    return f"{text}, converted from {steps}" if steps else text


def _first_bytes(config: Mapping[str, Any]) -> int | None:
    """Return the bytes of the first block of codes, if there are more blocks."""
    bits = CODE_BITS.get(config["feature_dtype"])
    prefixes = [] if bits is None else CodeFormat(bits, int(config["proj_dim"])).prefixes
    return prefixes[0] if len(prefixes) > 1 else None


def _checkpoint_rows(manifest: IndexManifest) -> list[dict[str, Any]]:
    single = len(manifest.checkpoints) == 1
    unnamed = "the model" if single else "not named: the model itself, or weights that you pass"
    return [
        {"model_id": model_id, "fingerprint": checkpoint.fingerprint, "source": str(checkpoint.source or unnamed)}
        for model_id, checkpoint in sorted(manifest.checkpoints.items())
    ]


def _curvature_rows(curvatures: Mapping[int, StoredCurvature]) -> list[dict[str, Any]]:
    labels = {"sampled": "drawn from the model", "empirical": "those of the data"}
    return [
        {
            "model_id": model_id,
            "kind": one.record.identity["kind"],
            "rows": f"{one.record.identity['rows']:,}",
            "labels": labels.get(str(one.record.identity["labels"]), one.record.identity["labels"]),
            "size": f"{one.size / 2**20:,.1f} MiB",
        }
        for model_id, one in sorted(curvatures.items())
    ]


def _fidelity(found: "Fidelity") -> str:
    products = ""
    if found.projection is not None:
        products = f", {found.projection.mean_spearman:.2f} of inner products of its features with exact ones"
    return (
        f"rank correlation {found.scores.mean_spearman:.2f} of its scores with {found.before} scores{products} "
        f"(checkpoints {list(found.model_ids)}, {found.rows} training rows × {found.targets} targets)"
    )


def _calibration(found: Calibration) -> str:
    agreement = sum(found.chosen.sums) / len(found.chosen.sums)
    return (
        f"`{named(found.chosen.method)}`, correlation {agreement:.2f} with a replay of the {found.by.of} on "
        f"{len(found.chosen.sums)} targets left out of the choice"
    )


def _link(name: str, prefix: str, revision: str | None, split: str | None = None) -> str:
    parts = [f"[{name}](https://huggingface.co/{prefix}{name})"]
    if revision:
        parts.append(f"revision {revision}")
    if split:
        parts.append(f"split {split}")
    return ", ".join(parts)
