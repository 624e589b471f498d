"""Whole attribution runs as processes that can be killed: forked from a server that has imported torch once.

A job featurizes two checkpoints of a tiny network, attributes three targets, and reports digests of all features,
Gram matrices and scores.
"""

import hashlib
import json
import multiprocessing
import os
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import PartialState
from datasets import Dataset, disable_progress_bars
from patience import Deadline, patient
from torch import Tensor, nn
from trak_options import trak_config

from hf_trak import TrakAttributor, TrakConfig
from hf_trak.errors import HfTrakError
from hf_trak.featurize.converting import convert_store
from hf_trak.featurize.fidelity import compare_stores
from hf_trak.runtime.processes import Processes
from hf_trak.store import atomic
from hf_trak.store.store import FeatureStore


class TinyNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(6, 5)
        self.head = nn.Linear(5, 3)

    def forward(self, pixel_values: Tensor) -> Tensor:
        return self.head(torch.tanh(self.body(pixel_values)))


@dataclass(frozen=True)
class Sizes:
    """What a job works on."""

    n: int = 23
    m: int = 3
    shard_size: int = 4
    batch_size: int = 3
    checkpoints: int = 2
    proj_dim: int = 16
    top_k: int = 5
    feature_dtype: str = "float32"


def rows(n: int, seed: int) -> Dataset:
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randn(n, 6, generator=generator)
    labels = torch.randint(0, 3, (n,), generator=generator)
    return Dataset.from_dict({"pixel_values": pixels.numpy(), "labels": labels.numpy()})


def models(count: int) -> list[TinyNet]:
    torch.manual_seed(5)
    return [TinyNet() for _ in range(count)]


def make(directory: Path, sizes: Sizes = Sizes(), **options: Any) -> TrakAttributor:  # frozen
    config = trak_config(
        output_dir=str(directory), use_cpu=True, proj_dim=sizes.proj_dim,
        shard_size=sizes.shard_size, per_device_batch_size=sizes.batch_size, feature_dtype=sizes.feature_dtype,
        **options,
    )  # fmt: skip
    return TrakAttributor(TinyNet(), config, train_dataset=rows(sizes.n, 1), task="image_classification")


def run_without_rank_1(directory: Path) -> dict[str, Any]:
    """The job of one of two processes that have met; the other is killed before it says a word."""
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    return run(directory)


def digest(values: Any) -> str:
    return hashlib.sha256(np.ascontiguousarray(values).tobytes()).hexdigest()


def feature_digests(directory: Path) -> dict[str, str]:
    """Every file of features and Gram matrices below a store, by the bytes in it."""
    return {
        str(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(directory.rglob("*.safetensors"))
    }


def run(directory: Path, sizes: Sizes = Sizes()) -> dict[str, Any]:
    """The whole job; what it found, as digests."""
    networks = models(sizes.checkpoints)
    attributor = make(directory, sizes).featurize(networks)
    targets = rows(sizes.m, 2)
    found: dict[str, Any] = {"self influence": digest(attributor.self_influence().numpy())}
    for per in ("target", "train"):
        top = attributor.attribute(targets, top_k=sizes.top_k, per=per).with_format("numpy")
        for name in ("trak_indices", "trak_scores", "trak_harmful_indices", "trak_harmful_scores"):
            found[f"{name} per {per}"] = digest(top[name][:])
        scores = attributor.attribute(targets, top_k=None, per=per).with_format("numpy")
        found[f"all scores per {per}"] = digest(scores["trak_scores"][:])
    return {"features": feature_digests(directory), "scores": found}


def report_of(function: Callable[..., Any], arguments: tuple[Any, ...]) -> dict[str, Any]:
    """What a function gave, or the error that it ended with."""
    try:
        return {"value": function(*arguments)}
    except (HfTrakError, ValueError) as error:
        return {"error": f"{type(error).__name__}: {error}"}


def _enter(report: str, environment: dict[str, str], function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    os.environ.update(environment)
    torch.set_num_threads(1)
    disable_progress_bars()
    if "WORLD_SIZE" in environment:
        # Who waits for a process that dies before they have met finds out by torch's timeout, usually half an hour.
        PartialState(cpu=True, timeout=timedelta(seconds=int(environment["TIMEOUT"])))
    result = report_of(function, arguments)
    temporary = f"{report}.tmp"
    Path(temporary).write_text(json.dumps(result))
    os.replace(temporary, report)


class Job:
    """One process. `report` is what it left behind, `None` if it was killed."""

    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        [
            "hf_trak.attributor", "hf_trak.gradient_computers.auto", "hf_trak.featurize.converting", "datasets",
            "transformers.trainer", "transformers.models.bert.modeling_bert", "transformers.models.gpt2.modeling_gpt2",
            "transformers.models.llama.modeling_llama",
            "torch.distributed.fsdp", "torch.distributed.tensor.parallel", "pytest",
        ]
    )  # fmt: skip

    def __init__(
        self,
        report: Path,
        function: Callable[..., Any],
        *arguments: Any,
        environment: dict[str, str] | None = None,
    ) -> None:
        self._path = report
        report.unlink(missing_ok=True)
        self.process: BaseProcess = self.context.Process(
            target=_enter, args=(str(report), environment or {}, function, arguments), daemon=True
        )
        self.process.start()

    def wait(self, seconds: float = 60.0) -> dict[str, Any] | None:
        deadline = Deadline(seconds)
        while self.process.exitcode is None:
            assert not deadline.passed(), "the process hangs"
            self.process.join(0.5)
        return json.loads(self._path.read_text()) if self._path.exists() else None

    def kill(self, number: int = signal.SIGKILL) -> None:
        if self.process.pid is not None and self.process.exitcode is None:
            os.kill(self.process.pid, number)


def start_group(
    directory: Path, world: int, function: Callable[..., Any], *arguments: Any, timeout: int = 10
) -> list[Job]:
    """Jobs that form a process group without a launcher, as `srun` starts them. `timeout` is torch's, in seconds."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    jobs = []
    for rank in range(world):
        environment = {
            "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world),
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TIMEOUT": str(int(patient(timeout))),
        }  # fmt: skip
        jobs.append(Job(directory / f"report-{rank}.json", function, *arguments, environment=environment))
    return jobs


def wait_for(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    deadline, checked = Deadline(seconds), 0
    while not condition():
        checked += 1
        assert checked % 100 or not deadline.passed(), "nothing happened"
        time.sleep(0.005)


def combination(index: int) -> tuple[float, list[int], int, int | None, str]:
    """λ relative, model ids, targets, `top_k` and `per` of one call of `attribute`."""
    return (
        (0.03, 0.3, 3.0)[index % 3],
        ([0], [1], [0, 1])[index // 3 % 3],
        (2, 3)[index // 9 % 2],
        (None, 4)[index // 18 % 2],
        ("target", "train")[index // 36 % 2],
    )


COMBINATIONS = 72


def attributed(directory: Path, index: int) -> Dataset:
    """The result of one combination, from an attributor of its own."""
    lam, model_ids, seed, top_k, per = combination(index)
    attributor = make(directory, lambda_relative=lam)
    networks = models(2)
    return attributor.attribute(
        rows(3, seed),
        top_k=top_k,
        per=per,
        checkpoints=dict(zip(model_ids, [networks[i] for i in model_ids], strict=True)),
    )


def numbers(result: Dataset) -> str:
    columns = [name for name in sorted(result.column_names) if name.startswith("trak_")]
    return digest(np.concatenate([np.ravel(result.with_format("numpy")[name][:]) for name in columns]))


def _first(row: dict[str, Any]) -> dict[str, Any]:
    return {"first": row["trak_scores"][0]}


def attribute_often(directory: Path, seed: int, calls: int, step: int) -> dict[str, Any]:
    """Many results of every `step`-th combination in a random order, each looked at when later ones have been written:
    as it is, pickled, and now and then read by other processes (`num_proc`)."""
    import pickle

    order = np.random.default_rng(seed).choice(range(0, COMBINATIONS, step), size=calls).tolist()
    kept: list[tuple[int, Dataset]] = []
    found: list[tuple[int, str]] = []

    def look(index: int, result: Dataset, count: int) -> None:
        found.append((index, numbers(result)))
        found.append((index, numbers(pickle.loads(pickle.dumps(result)))))
        if count % 50 == 0:
            firsts = result.map(_first, num_proc=2, load_from_cache_file=False)["first"][:]
            assert firsts == [row[0] for row in result["trak_scores"]]

    for count, index in enumerate(order):
        kept.append((index, attributed(directory, index)))
        if len(kept) > 5:
            look(*kept.pop(0), count)
    for index, result in kept:
        look(index, result, 1)
    return {"found": found}


def every_combination(directory: Path, step: int) -> dict[str, Any]:
    make(directory).featurize(models(2))
    return {"numbers": [numbers(attributed(directory, index)) for index in range(0, COMBINATIONS, step)]}


def convert_and_die(directory: Path, step: int) -> dict[str, Any]:
    """Convert, and be killed right before the `step`-th system call that makes a file visible or durable."""
    calls = 0
    for name in ("fsync", "replace", "link"):
        function = getattr(atomic.os, name)

        def call(*arguments: Any, function: Any = function, **options: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == step:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*arguments, **options)

        setattr(atomic.os, name, call)
    convert_store(FeatureStore.load(directory / "source"), directory / "killed", "int2", TrakConfig())
    return {"steps": calls}


def convert_together(directory: Path) -> dict[str, Any]:
    source = FeatureStore.load(directory / "source")
    args, processes = TrakConfig(use_cpu=True), Processes(True)
    result = convert_store(source, directory / "together", "int2", args, processes)
    return {"fidelity": compare_stores(source, result, args, processes, targets=5).to_dict()}
