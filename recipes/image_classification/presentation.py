"""The end of the recipe: printed targets, a summary, a picture, the scored dataset."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from image_data import DataArguments
from kit.files import save_dataset, write_json
from kit.grid import image_grid

from hf_trak.modelout_functions.margins import margin


@dataclass
class Attribution:
    """The outcome of a run: rows, their scores, and the model's predictions for the targets."""

    train: Dataset
    scored: Dataset
    logits: np.ndarray
    """Logits of the last checkpoint, `(targets, classes)`."""
    self_influence: torch.Tensor
    """Self-influence of the training rows, `(n_train,)`."""


def present(
    found: Attribution, data: DataArguments, output_dir: Path, *, num_targets: int, images_per_side: int, facts: dict
) -> None:
    """Write `scored/`, `attribution.png` and `summary.json`, and print the essence.

    Args:
        found: the outcome.
        data: names of the dataset and its columns.
        output_dir: where files go.
        num_targets: targets to print and draw: those with the lowest margin, so misclassified ones first.
        images_per_side: training images to print and draw on either side.
        facts: more entries of the summary.
    """
    names = found.train.features[data.label_column].names
    train_labels, labels = (np.asarray(dataset[data.label_column]) for dataset in (found.train, found.scored))
    guesses = found.logits.argmax(axis=-1)
    # The more negative the margin, the surer the model is of its mistake.
    margins = margin(torch.from_numpy(found.logits).double(), torch.from_numpy(labels)).numpy()
    rows = np.argsort(margins)[:num_targets].tolist()

    def side(target: dict[str, Any], prefix: str) -> list[dict[str, Any]]:
        indices, scores = (target[f"trak_{prefix}{part}"][:images_per_side] for part in ("indices", "scores"))
        return [
            {"row": index, "label": names[train_labels[index]], "score": score}
            for index, score in zip(indices, scores, strict=True)
        ]

    targets = [
        {
            "row": row,
            "label": names[labels[row]],
            "predicted": names[guesses[row]],
            "helped_most": side(found.scored[row], ""),
            "harmed_most": side(found.scored[row], "harmful_"),
        }
        for row in rows
    ]
    helpers = np.stack(found.scored.select_columns(["trak_indices"]).with_format("numpy")["trak_indices"][:])[:, :5]
    strange = found.self_influence.argsort(descending=True)[:20].tolist()
    summary = {
        "dataset": data.dataset_name,
        "train_rows": len(train_labels),
        "targets": len(labels),
        "accuracy": float((guesses == labels).mean()),
        "same_label_among_top_5": float((train_labels[helpers] == labels[:, None]).mean()),
        "attributions": targets,
        "highest_self_influence": [
            {"row": row, "label": names[train_labels[row]], "score": float(found.self_influence[row])}
            for row in strange
        ],
        **facts,
    }
    save_dataset(found.scored, output_dir / "scored")
    picture = image_grid(
        found.scored,
        found.train,
        rows,
        output_dir / "attribution.png",
        image_column=data.image_column,
        label_column=data.label_column,
        n=images_per_side,
        predictions=guesses.tolist(),
        title=f"{Path(data.dataset_name).name}: which training images taught the model this?",
    )
    write_json(output_dir / "summary.json", summary)

    for target in targets:
        verdict = "right" if target["label"] == target["predicted"] else "WRONG"
        print(f"\nTarget {target['row']}: label {target['label']}, predicted {target['predicted']} ({verdict})")
        for key in ("helped_most", "harmed_most"):
            shown = [f"{item['label']} (row {item['row']}, {item['score']:+.3g})" for item in target[key]]
            print(f"  {key.replace('_', ' ')}: {', '.join(shown)}")
    print(f"\nHighest self-influence, worth a look for wrong labels: training rows {strange[:10]}")
    print(
        f"\n{len(train_labels)} training images, {len(labels)} targets, accuracy {summary['accuracy']:.1%}. Of "
        f"the five training images that helped a target most, {summary['same_label_among_top_5']:.1%} share its label."
    )
    print(f"Picture: {picture}\nScores:  {output_dir / 'scored'}")
