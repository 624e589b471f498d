"""Small real `Trainer` runs that are recorded and replayed, also in processes that are killed."""

import hashlib
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from store_jobs import Job
from trak_options import trak_config
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from hf_trak import TrakAttributor, TrakConfig
from hf_trak.callbacks import TrakCallback
from hf_trak.evaluation.trainer_retraining import model_outputs
from hf_trak.methods import Replay
from hf_trak.trajectory import sweep
from hf_trak.trajectory.passes import StepPasses

ROWS, TARGETS, WORDS, LENGTH = 10, 3, 17, 6


def sentences(count: int, seed: int, cut: bool = False) -> Dataset:
    """Rows of tokens, all different; every third has fewer labels if `cut`."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randint(0, WORDS, (count, LENGTH), generator=generator).tolist()
    masked = [[-100, -100, *row[2:]] if cut and i % 3 == 0 else row for i, row in enumerate(rows)]
    return Dataset.from_list([{"input_ids": a, "labels": b} for a, b in zip(rows, masked, strict=True)])


TRAIN, EVAL = sentences(ROWS, 0, cut=True), sentences(TARGETS, 1)


def tiny(dtype: torch.dtype = torch.float64, dropout: float = 0.0, attention: str = "sdpa") -> GPT2LMHeadModel:
    """A GPT-2 of about 1,000 parameters, by default without dropout."""
    torch.manual_seed(1)
    config = GPT2Config(
        n_layer=1, n_head=2, n_embd=8, vocab_size=WORDS, n_positions=8, attn_implementation=attention,
        resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout,
    )  # fmt: skip
    return GPT2LMHeadModel(config).to(dtype)


class RowWeights:
    """The loss of `transformers` for language models in the model's own precision, with a weight for each row.

    Their own computes logits in float32, too coarse for differences of retrainings. Rows of a batch may also lie end
    to end in one sequence.
    """

    def __init__(self, documents: dict[int, list[list[int]]] | None = None) -> None:
        """`documents`: labels of the documents of each row, which are the rows of `TRAIN` by default."""
        self.of: dict[int, float] = {}
        documents = {i: [row["labels"]] for i, row in enumerate(TRAIN)} if documents is None else documents
        self._rows = {tuple(one[1:]): row for row, labels in documents.items() for one in labels}

    def __call__(self, logits, labels, vocab_size=None, num_items_in_batch=None, **options):
        logits, labels = (one.unflatten(1, (-1, LENGTH)).flatten(0, 1) for one in (logits, labels))
        losses = torch.nn.functional.cross_entropy(logits[:, :-1].transpose(1, 2), labels[:, 1:], reduction="none")
        count = labels[:, 1:].ne(-100).sum() if num_items_in_batch is None else num_items_in_batch
        return (losses.sum(1) * self.factors(labels)).sum() / count

    def factors(self, labels: torch.Tensor) -> torch.Tensor:
        """The weight of each row of a batch, `(B,)`."""
        found = [self.of.get(self._rows.get(tuple(row[1:]), -1), 1.0) for row in labels.tolist()]
        return torch.tensor(found, dtype=torch.float64)


def trainer(directory: Path, model: Any = None, rows: Any = TRAIN, **options: Any) -> Trainer:
    """A trainer of 9 steps of two batches of two rows. The last batch of an epoch has one row."""
    defaults: dict[str, Any] = {
        "num_train_epochs": 3, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "seed": 3,
        "learning_rate": 1e-2, "weight_decay": 0.1, "max_grad_norm": 0.5, "use_cpu": True, "save_strategy": "no",
        "report_to": [], "disable_tqdm": True, "logging_strategy": "no",
    }  # fmt: skip
    callbacks, kind = options.pop("callbacks", []), options.pop("kind", Trainer)
    collator, held_out = options.pop("data_collator", None), options.pop("eval_dataset", None)
    arguments = TrainingArguments(str(directory / "out"), **{**defaults, **options})
    model = tiny() if model is None else model
    return kind(model, arguments, collator, rows, held_out, callbacks=callbacks)


def config(directory: Path, **options: Any) -> TrakConfig:
    return trak_config(str(directory / "trak"), proj_dim=8, shard_size=4, use_cpu=True, **options)


def recorded(directory: Path, model: Any = None, every: int = 1, **options: Any) -> Trainer:
    """Train with a record."""
    callback = TrakCallback(config(directory), record=True, every=every)
    run = trainer(directory, model, callbacks=[callback, *options.pop("callbacks", [])], **options)
    run.train(resume_from_checkpoint=get_last_checkpoint(run.args.output_dir) if resumable(run) else None)
    return run


def resumable(run: Trainer) -> bool:
    return os.path.isdir(run.args.output_dir) and get_last_checkpoint(run.args.output_dir) is not None


def replayed(run: Trainer, directory: Path, method: Replay, eval_dataset: Any = EVAL, **options: Any) -> Any:
    """The scores of a replay, `(m, n)`."""
    attributor = TrakAttributor.from_trainer(run, config(directory))
    return attributor.attribute(eval_dataset, top_k=None, method=method, name="replayed", **options)


def outputs(model: Any) -> torch.Tensor:
    """f of every target, `(m,)`."""
    return torch.from_numpy(model_outputs(model, EVAL, batch_size=1))


def differences(weights: RowWeights, train: Callable[[], torch.Tensor], step: float = 1e-6) -> torch.Tensor:
    """Central differences of the outputs after a training by the weight of each row, `(m, n)`."""
    columns = []
    for row in range(ROWS):
        sides = []
        for sign in (1, -1):
            weights.of = {row: 1 + sign * step}
            sides.append(train())
        columns.append((sides[0] - sides[1]) / (2 * step))
    weights.of = {}
    return torch.stack(columns, 1)


def record_files(directory: Path) -> dict[str, str]:
    """The bytes of a record, hashed by the names of its files."""
    place = directory / "trak" / "trajectory" / "run"
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(place.iterdir())}


# -- processes that are killed ----------------------------------------------------------------------------------------


def killed_at_file(number: int, after: bool) -> None:
    """Kill this process when it puts its n-th file of hf_trak in place, before or after."""
    put, count = os.replace, [0]

    def replace(source: Any, target: Any, **options: Any) -> None:
        ours = os.path.basename(str(source)).startswith(".hf_trak-tmp-")
        count[0] += ours
        if ours and count[0] == number and not after:
            os.kill(os.getpid(), signal.SIGKILL)
        put(source, target, **options)
        if ours and count[0] == number:
            os.kill(os.getpid(), signal.SIGKILL)

    os.replace = replace  # type: ignore[assignment]


def train_and_die(directory: Path, number: int, after: bool) -> None:
    """Train with a record and checkpoints every two steps, up to a kill."""
    killed_at_file(number, after)
    recorded(directory, tiny(dropout=0.1), save_strategy="steps", save_steps=2)


def killed_at_product(number: int, after: bool) -> None:
    """Kill this process at its n-th product with a curvature, before or after."""
    multiply, count = StepPasses.curvature, [0]

    def curvature(self: StepPasses, *given: Any) -> torch.Tensor:
        count[0] += 1
        found = multiply(self, *given) if after or count[0] != number else None
        if count[0] == number:
            os.kill(os.getpid(), signal.SIGKILL)
        assert found is not None
        return found

    StepPasses.curvature = curvature  # type: ignore[method-assign]


def replay_and_die(directory: Path, moment: str, number: int, after: bool) -> None:
    """Replay the last checkpoint of a recorded run, up to a kill at a `"file"` or a `"product"`."""
    (killed_at_file if moment == "file" else killed_at_product)(number, after)
    replay_saved(directory)


def replay_saved(directory: Path) -> Any:
    """Replay a run of another process, which saved its last weights, in parts of a few steps."""
    sweep.KEPT_BYTES = 0
    model = tiny(dropout=0.1)
    model.load_state_dict(torch.load(directory / "last.pt", weights_only=True))
    return replayed(trainer(directory, model), directory, Replay(of="run", hessian_share=0.5))


def replay_in_group(directory: str) -> dict[str, Any]:
    """Replay in one of several processes, two directions at a time, and count those that this one has multiplied."""
    sweep.TOGETHER, counts = 2, []
    curvature = StepPasses.curvature

    def watching(self: Any, batches: Any, chosen: Any, directions: Any, form: Any) -> Any:
        counts.extend(len(one) for one in directions)
        return curvature(self, batches, chosen, directions, form)

    StepPasses.curvature = watching  # type: ignore[method-assign]
    scores = [list(row) for row in replay_saved(Path(directory))["trak_scores"]]
    return {"scores": scores, "products": sum(counts)}


def watched(model: Any) -> list[list[int]]:
    """Note the rows of every batch that a model is trained on, by their tokens."""
    numbers = {tuple(row["input_ids"]): number for number, row in enumerate(TRAIN)}
    seen: list[list[int]] = []

    def before(module: Any, args: Any, kwargs: Any) -> None:
        if module.training:
            seen.append([numbers[tuple(row)] for row in kwargs["input_ids"].tolist()])

    model.register_forward_pre_hook(before, with_kwargs=True)
    return seen


def train_in_group(directory: str, across: bool) -> list[list[int]]:
    """Train in one of several processes, and return the batches of this one."""
    model = tiny(dropout=0.1)
    seen = watched(model)
    run = recorded(
        Path(directory), model, average_tokens_across_devices=across, per_device_train_batch_size=1, max_grad_norm=0.0
    )
    if run.args.process_index == 0:
        torch.save(run.model.state_dict(), Path(directory) / "last.pt")
    return seen


def in_process(function: Callable[..., None], *arguments: Any) -> int:
    """Run a function in a process of its own, and return its exit code."""
    process = Job.context.Process(target=_alone, args=(function, *arguments))
    process.start()
    process.join()
    assert process.exitcode is not None
    return process.exitcode


def _alone(function: Callable[..., None], *arguments: Any) -> None:
    torch.set_num_threads(1)
    function(*arguments)
