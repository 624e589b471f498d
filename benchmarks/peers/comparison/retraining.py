"""Ground truth: the outputs of every target after retraining on random halves."""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from comparison.cases import Case, Logits
from comparison.objective import label_tokens, losses, margins
from hf_trak.evaluation import random_subsets

GROUP = 20
"""Number of models that are trained at once, and the most that an interrupted run loses."""

BATCH = 50


def train(case: Case, masks: Tensor, seed: int) -> list[nn.Module]:
    """One model for each mask `(s, n)`, all at once with `torch.func`, each on the rows of its mask."""
    models = fresh_models(case, len(masks), seed)
    torch.manual_seed(seed)
    bare = Logits(models[0], list(case.inputs))
    stacked, _ = torch.func.stack_module_state([Logits(model, bare.names) for model in models])
    weights = {name: value.detach().requires_grad_() for name, value in stacked.items()}
    optimizer = torch.optim.AdamW(weights.values(), lr=case.learning_rate, weight_decay=1e-2)
    *tensors, labels = case.batches(case.train, case.train_rows)[0]

    def loss(parameters: dict[str, Tensor], keep: Tensor, x: list[Tensor], y: Tensor) -> Tensor:
        logits = torch.func.functional_call(bare, parameters, tuple(x))
        counted = label_tokens(logits, y)[2].sum(1)  # a mean over tokens, as transformers has it
        return (losses(logits, y) * keep).sum() / (counted * keep).sum().clamp_min(1)

    steps = case.epochs * -(-case.train_rows // BATCH)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, steps)  # what Trainer does; much less noise
    for _ in range(case.epochs):
        for rows in torch.randperm(case.train_rows).split(BATCH):
            optimizer.zero_grad()
            per_model = torch.func.vmap(loss, in_dims=(0, 0, None, None))(
                weights, masks[:, rows].float(), [tensor[rows] for tensor in tensors], labels[rows]
            )
            per_model.sum().backward()
            optimizer.step()
            schedule.step()
    with torch.no_grad():
        for index, model in enumerate(models):
            for name, parameter in Logits(model, bare.names).named_parameters():
                parameter.copy_(weights[name][index])
    return [model.eval() for model in models]


def fresh_models(case: Case, count: int, seed: int) -> list[nn.Module]:
    """Untrained models: alike where the case says so, as fine-tuning starts from one pretrained model."""
    models = []
    for index in range(count):
        torch.manual_seed(0 if case.same_start else seed + index)
        models.append(case.make())
    return models


def target_outputs(case: Case, model: nn.Module) -> np.ndarray:
    """f of every target, `(m,)`."""
    bare = Logits(model, list(case.inputs))
    with torch.no_grad():
        return torch.cat([margins(bare(*x), y) for *x, y in case.batches(case.targets, 200)]).numpy()


def checkpoints(case: Case, count: int, directory: Path) -> list[nn.Module]:
    """Models trained on all rows, independently; kept in a file of the directory."""
    path = directory / f"checkpoints-{count}.pt"
    models = [case.make() for _ in range(count)]
    if not path.is_file():
        models = train(case, torch.ones(count, case.train_rows, dtype=torch.bool), 99)
        partial = path.with_suffix(".part")
        torch.save([model.state_dict() for model in models], partial)
        partial.rename(path)
    for model, state in zip(models, torch.load(path, weights_only=True), strict=True):
        model.load_state_dict(state)
    return [model.eval() for model in models]


def ground_truth(case: Case, subsets: int, repeats: int, directory: Path) -> tuple[np.ndarray, np.ndarray]:
    """Masks `(s, n)`, and f of the targets `(s, m)` averaged over repeats. Existing files are not made again."""
    masks = random_subsets(case.train_rows, subsets, seed=7)
    np.save(directory / f"masks-{subsets}.npy", masks)
    outputs = np.zeros((subsets, len(case.labels) - case.train_rows))
    for repeat in range(repeats):
        for start in range(0, subsets, GROUP):
            path = directory / f"outputs-{subsets}-{repeat}-{start}.npy"
            rows = slice(start, min(start + GROUP, subsets))
            if not path.is_file():
                models = train(case, torch.tensor(masks[rows]), 1000 * repeat + start)
                partial = directory / "part.npy"
                np.save(partial, np.stack([target_outputs(case, model) for model in models]))
                partial.rename(path)
            outputs[rows] += np.load(path, allow_pickle=False) / repeats
    return masks, outputs
