"""hf_trak beside traker 0.3.2, dattri 0.3.0 and bergson 2.5.1: time, memory and LDS on the same work in one run.

    python recipes/benchmarks/peers.py --peers peers --json peers.json --plot peers.png

`--peers` names a directory into which each library that is not there yet is installed, into a folder of its own.
Every measurement is a fresh process with one library on its path; they take turns. The task is a CNN on scikit-learn's
digits: 1,000 training rows, 200 targets, and the margins of networks retrained on random halves. Each library runs as
its documentation shows for classifiers, at one k, at its own default λ, and with λ tuned: chosen from one relative
grid by the LDS of one half of the targets, reported on the other half, as the default is too.

A library that cannot do the work stands in the table with its error.
"""

import argparse
import copy
import json
import logging
import os
import platform
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

REQUIREMENTS = {
    "hf_trak": [],
    "traker": ["traker==0.3.2"],
    "dattri": ["dattri==0.3.0"],
    "bergson": [
        "bergson==2.5.1", "jaxtyping", "wadler_lindig", "natsort", "petname", "simple-parsing", "docstring-parser",
        "ml_dtypes", "torchopt", "optree", "graphviz",
    ],
}  # fmt: skip
LIBRARIES = list(REQUIREMENTS)


# -- workers: one library in a process of its own --------------------------------------------------------------------


class Clock:
    """Wall and CPU seconds of the stages of a worker."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.cpu = 0.0

    def time(self, stage: str, run: Callable[[], Any]) -> Any:
        wall, cpu = time.perf_counter(), time.process_time()
        result = run()
        self.seconds[stage] = time.perf_counter() - wall
        self.cpu += time.process_time() - cpu
        return result


def work_with_hf_trak(job: dict[str, Any], clock: Clock, lambdas: list[float]) -> dict[str, np.ndarray]:
    from datasets import Dataset, disable_progress_bars
    from lds_digits import WithNames

    from hf_trak import TrakAttributor, TrakConfig
    from hf_trak.projectors import make_projector

    disable_progress_bars()
    models = [WithNames(network) for network in job["networks"]]
    train, targets = (
        Dataset.from_dict({"pixel_values": x.numpy(), "labels": y.numpy()}) for x, y in (job["train"], job["targets"])
    )

    def attributor(**options: Any) -> TrakAttributor:
        config = TrakConfig(
            output_dir=job["directory"],
            proj_dim=job["k"],
            per_device_batch_size=job["batch"],
            use_cpu=True,
            disable_tqdm=True,
            **options,
        )
        return TrakAttributor(models[0], config, train, task="image_classification")

    def score(own: TrakAttributor, name: str) -> np.ndarray:
        scored = own.attribute(targets, top_k=None, name=name, checkpoints=models)
        return np.stack(scored.with_format("numpy")["trak_scores"][:]).T.copy()

    own = attributor()
    clock.time("featurize", lambda: own.featurize(models))
    found = {"default": clock.time("score", lambda: score(own, "targets"))}
    for relative in lambdas:
        found[f"{relative:g}"] = score(attributor(lambda_relative=relative), "targets")
    block = job["block"]
    projector = make_projector("sjlt", grad_dim=block.shape[1], proj_dim=job["k"], seed=0, device="cpu")
    out = torch.zeros(len(block), job["k"])
    projector.accumulate(out, block, 0, 0)
    clock.time("project", lambda: projector.accumulate(out, block, 0, 0))
    return found


def work_with_traker(job: dict[str, Any], clock: Clock, lambdas: list[float]) -> dict[str, np.ndarray]:
    from trak import TRAKer
    from trak.projectors import BasicProjector, ProjectionType

    def tracker(directory: str, **options: Any) -> Any:
        return TRAKer(
            model=copy.deepcopy(job["networks"][0]),
            task="image_classification",
            train_set_size=len(job["train"][0]),
            save_dir=directory,
            device="cpu",
            proj_dim=job["k"],
            use_half_precision=False,
            logging_level=logging.ERROR,
            **options,
        )

    def featurize(own: Any) -> None:
        for model_id, network in enumerate(job["networks"]):
            own.load_checkpoint(network.state_dict(), model_id=model_id)
            for batch in batches(job["train"], job["batch"]):
                own.featurize(batch=batch, num_samples=len(batch[0]))

    def score(own: Any) -> np.ndarray:
        own.finalize_features()
        for model_id, network in enumerate(job["networks"]):
            own.start_scoring_checkpoint("targets", network.state_dict(), model_id, len(job["targets"][0]))
            for batch in batches(job["targets"], job["batch"]):
                own.score(batch=batch, num_samples=len(batch[0]))
        return np.array(own.finalize_scores("targets"))

    first = str(Path(job["directory"]) / "default")
    own = tracker(first)
    clock.time("featurize", lambda: featurize(own))
    for relative in lambdas:  # features are copied before they are made final
        shutil.copytree(first, f"{first}-{relative:g}")
    features = torch.tensor(np.array(own.saver.current_store["grads"]))
    unit = float(features.square().sum()) / min(features.shape)
    found = {"default": clock.time("score", lambda: score(own))}
    for relative in lambdas:
        other = tracker(f"{first}-{relative:g}", lambda_reg=relative * unit)
        for model_id, network in enumerate(job["networks"]):
            other.load_checkpoint(network.state_dict(), model_id=model_id)
        found[f"{relative:g}"] = score(other)
    block = job["block"]
    projector = BasicProjector(block.shape[1], job["k"], 0, ProjectionType.rademacher, "cpu")
    clock.time("project", lambda: projector.project(block, 0))
    return found


def work_with_dattri(job: dict[str, Any], clock: Clock, lambdas: list[float]) -> dict[str, np.ndarray]:
    from dattri.algorithm.trak import TRAKAttributor
    from dattri.func.projection import random_project
    from dattri.task import AttributionTask
    from torch.utils.data import DataLoader, TensorDataset

    network = copy.deepcopy(job["networks"][0])

    def margin(parameters: dict[str, Tensor], sample: tuple[Tensor, Tensor]) -> Tensor:
        logp = -cross_entropy(parameters, sample)
        return logp - torch.log(1 - torch.exp(logp))

    def probability(parameters: dict[str, Tensor], sample: tuple[Tensor, Tensor]) -> Tensor:
        return torch.exp(-cross_entropy(parameters, sample))

    def cross_entropy(parameters: dict[str, Tensor], sample: tuple[Tensor, Tensor]) -> Tensor:
        image, label = sample
        logits = torch.func.functional_call(network, parameters, image.unsqueeze(0))
        return nn.functional.cross_entropy(logits, label.unsqueeze(0))

    task = AttributionTask(margin, network, [dict(each.state_dict()) for each in job["networks"]])
    kwargs = {"proj_dim": job["k"], "device": "cpu"}
    train, targets = (
        DataLoader(TensorDataset(*rows), batch_size=job["batch"]) for rows in (job["train"], job["targets"])
    )

    def attributor(regularization: float | None = None) -> Any:
        options = {} if regularization is None else {"regularization": regularization}
        return TRAKAttributor(task, probability, projector_kwargs=dict(kwargs), device="cpu", **options)

    def score(own: Any) -> np.ndarray:
        return own.attribute(targets).numpy()

    own = attributor()
    with torch.no_grad():
        clock.time("featurize", lambda: own.cache(train))
        found = {"default": clock.time("score", lambda: score(own))}
        if lambdas:  # λ relative to the trace, of features made as `cache` makes them
            parameters, _ = task.get_param(ckpt_idx=0)
            trace = 0.0
            for batch in train:
                grads = torch.nan_to_num(own.grad_loss_func(parameters, batch)) / own.norm_scaler
                project = random_project(grads, len(grads), **own.projector_kwargs)
                trace += float(project(grads, ensemble_id=0).square().sum())
        for relative in lambdas:
            other = attributor(relative * trace / min(len(job["train"][0]), job["k"]))
            other.cache(train)
            found[f"{relative:g}"] = score(other)
        block = job["block"]
        clock.time("project", lambda: random_project(block, len(block), **own.projector_kwargs)(block, 0))
    return found


def work_with_bergson(job: dict[str, Any], clock: Clock, lambdas: list[float]) -> dict[str, np.ndarray]:
    """Its TRAK command, which takes Hugging Face language models by name or directory, on the network's weights."""
    from safetensors.torch import save_file

    directory = Path(job["directory"]) / "model"
    directory.mkdir()
    save_file(job["networks"][0].state_dict(), directory / "model.safetensors")
    (directory / "config.json").write_text("{}")
    texts = directory.parent / "texts.json"
    texts.write_text(json.dumps({"text": "0"}) + "\n")
    command = [sys.executable, "-m", "bergson", "trak", str(directory.parent / "run")]
    command += ["--model", str(directory), "--data.dataset", str(texts)]
    command += ["--loss_fn", "log_odds", "--projection_target", "global"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    lines = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
    raise RuntimeError(f"`bergson trak` on the network's weights: {lines[-1].strip() if lines else done.returncode}")


WORKERS = {
    "hf_trak": work_with_hf_trak,
    "traker": work_with_traker,
    "dattri": work_with_dattri,
    "bergson": work_with_bergson,
}


def batches(rows: tuple[Tensor, Tensor], size: int) -> list[list[Tensor]]:
    return [list(batch) for batch in zip(*(tensor.split(size) for tensor in rows), strict=True)]


def worker(library: str, path: Path, lambdas: list[float]) -> None:
    """Do the work; print times as JSON in the last line; write scores beside the job."""
    from lds_digits import N_TEST, N_TRAIN, NETWORKS, digits

    given = np.load(path / "job.npz", allow_pickle=False)
    torch.set_num_threads(int(given["threads"]))
    weights = torch.load(path / "checkpoints.pt", weights_only=True)
    networks = []
    for state in weights:
        networks.append(NETWORKS["cnn"]().eval())
        networks[-1].load_state_dict(state)
    images, labels = digits()
    grad_dim = sum(parameter.numel() for parameter in networks[0].parameters())
    with tempfile.TemporaryDirectory() as directory:
        job = {
            "networks": networks,
            "train": (images[:N_TRAIN], labels[:N_TRAIN]),
            "targets": (images[N_TRAIN : N_TRAIN + N_TEST], labels[N_TRAIN : N_TRAIN + N_TEST]),
            "k": int(given["k"]),
            "batch": 100,
            "block": torch.randn(32, grad_dim, generator=torch.Generator().manual_seed(0)),
            "directory": directory,
        }
        clock = Clock()
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        found = WORKERS[library](job, clock, lambdas)
        peak = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    np.savez(path / f"{library}.npz", **found)
    print(json.dumps({"seconds": clock.seconds, "cpu": clock.cpu, "peak_mib": peak}))


# -- the run ---------------------------------------------------------------------------------------------------------


def install(library: str, directory: Path) -> None:
    """Install a peer into a folder of its own, unless it is there."""
    if not REQUIREMENTS[library] or (directory / library).is_dir():
        return
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(directory / library)]
    subprocess.run([*command, *REQUIREMENTS[library]], check=True)


def call(library: str, path: Path, peers: Path, lambdas: list[float]) -> dict[str, Any]:
    """What the worker of a library printed, or its error."""
    here = Path(__file__).resolve().parent
    places = [str(peers.resolve() / library), str(here), str(here.parents[1])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(places), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, __file__, "--worker", library, str(path), "--lambdas", *map(str, lambdas)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode == 0:
        return json.loads(done.stdout.splitlines()[-1])
    return {"error": (done.stderr.strip().splitlines() or ["no message"])[-1]}


def quality(
    library: str, path: Path, masks: np.ndarray, outputs: np.ndarray, ours: dict[str, Any] | None
) -> dict[str, Any]:
    """LDS at the default λ and at the tuned one, on the half of the targets that nothing was tuned on; and what
    hf_trak (`ours`, its own result of this function) has more, with the interval of the difference.
    """
    from hf_trak.evaluation import compare_lds, evaluate_lds, linear_datamodeling_score

    found = dict(np.load(path / f"{library}.npz", allow_pickle=False))
    tune, test = slice(0, None, 2), slice(1, None, 2)
    broken = [name for name, scores in found.items() if not np.isfinite(scores).all()]
    by_lambda = {
        name: float(linear_datamodeling_score(scores[:, tune], masks, outputs[:, tune]).mean())
        for name, scores in found.items()
        if name not in (*broken, "default")
    }
    result: dict[str, Any] = {"by_lambda": by_lambda, "not_finite": broken}
    chosen = {"default": "default", "tuned": max(by_lambda, key=lambda name: by_lambda[name], default="default")}
    for kind, name in chosen.items():
        if name not in broken:
            result[kind] = evaluate_lds(found[name][:, test], masks, outputs[:, test], resamples=300).mean.to_dict()
            if ours is not None:
                own = ours["tuned_lambda"] if kind == "tuned" else "default"
                scores = np.load(path / "hf_trak.npz", allow_pickle=False)[own]
                pair = (scores[:, test], found[name][:, test])
                result[f"behind_{kind}"] = compare_lds(*pair, masks, outputs[:, test], resamples=300).to_dict()
    result["tuned_lambda"] = chosen["tuned"]
    return result


def ratio(rounds: list[dict[str, Any]], ours: list[dict[str, Any]], stage: str) -> str:
    """Seconds of a library ÷ ours, within each round: median and range."""
    values = [a["seconds"][stage] / b["seconds"][stage] for a, b in zip(rounds, ours, strict=True)]
    return f"{statistics.median(values):.1f} ({min(values):.1f}–{max(values):.1f})"


def table(results: dict[str, Any], n_train: int) -> str:
    """Markdown."""

    def lds(name: str, kind: str) -> str:
        found = results[name]["lds"].get(kind)
        missing = "" if kind.startswith("behind") else "not finite"
        return missing if found is None else f"{found['value']:.3f} [{found['low']:.3f}, {found['high']:.3f}]"

    lines = [
        "| | featurize, rows/s | × our time | projection alone, × our time | scoring, × our time | peak, MiB | LDS at "
        "defaults | ours − theirs | LDS, λ tuned | ours − theirs | LDS per CPU-minute |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    ours = results["hf_trak"].get("rounds", [])
    for name, entry in results.items():
        if "error" in entry:
            lines.append(f"| {name} | cannot: {entry['error'].replace('|', '/')[:200]} |" + " |" * 9)
            continue
        rounds = entry["rounds"]
        speed = n_train / statistics.median(each["seconds"]["featurize"] for each in rounds)
        minutes = statistics.median(each["cpu"] for each in rounds) / 60
        value = entry["lds"].get("default", {}).get("value", 0.0)
        peak = max(each["peak_mib"] for each in rounds)
        ratios = " | ".join(ratio(rounds, ours, stage) for stage in ("featurize", "project", "score"))
        kinds = ("default", "behind_default", "tuned", "behind_tuned")
        quality_columns = f"{' | '.join(lds(name, kind) for kind in kinds)} | {value / minutes:.2f}"
        lines.append(f"| {name} | {speed:.0f} | {ratios} | {peak:.0f} | {quality_columns} |")
    return "\n".join(lines)


def plot(results: dict[str, Any], path: Path) -> None:
    """LDS over the time of one attribution, and LDS by λ."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4))
    for name, entry in results.items():
        if "error" in entry:
            continue
        seconds = statistics.median(
            sum(each["seconds"][s] for s in ("featurize", "score")) for each in entry["rounds"]
        )
        if found := entry["lds"].get("default"):
            spread = [[found["value"] - found["low"]], [found["high"] - found["value"]]]
            left.errorbar(seconds, found["value"], yerr=spread, fmt="o", capsize=3, label=name)
        curve = sorted((float(relative), value) for relative, value in entry["lds"]["by_lambda"].items())
        right.plot(*zip(*curve, strict=True), marker="o", label=name)
    left.set(xscale="log", xlabel="seconds, featurize and score", ylabel="LDS at defaults")
    right.set(xscale="log", xlabel="λ ÷ (trace / min(n, k))", ylabel="LDS")
    left.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=Path, default=Path("peers"), help="directory of the installed libraries")
    parser.add_argument("--libraries", nargs="+", choices=LIBRARIES, default=LIBRARIES)
    parser.add_argument("--checkpoints", type=int, default=1)
    parser.add_argument("--proj-dim", type=int, default=512, help="k of all libraries")
    parser.add_argument("--subsets", type=int, default=60)
    parser.add_argument("--repeats", type=int, default=2, help="trainings averaged per subset")
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--rounds", type=int, default=3, help="timed rounds, after one that tunes λ")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--lambdas", nargs="*", type=float, default=[1e-4, 1e-3, 1e-2, 0.1, 0.3, 1.0, 3.0, 10.0])
    parser.add_argument("--work", type=Path, help="directory that keeps retrainings and scores between runs")
    parser.add_argument("--prepare", action="store_true", help="install, retrain and tune, but time nothing")
    parser.add_argument("--json", type=Path, help="file to write the results to")
    parser.add_argument("--plot", type=Path, help="PNG to draw")
    parser.add_argument("--worker", nargs=2, metavar=("LIBRARY", "JOB"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    logging.disable(logging.WARNING)
    if args.worker:
        worker(args.worker[0], Path(args.worker[1]), args.lambdas)
        return

    from ensembles import retrained
    from lds_digits import N_TRAIN, train

    with tempfile.TemporaryDirectory() as scratch:
        path = args.work or Path(scratch)
        path.mkdir(parents=True, exist_ok=True)
        for library in args.libraries:
            install(library, args.peers)
        masks, outputs = retrained("cnn", args.subsets, args.repeats, args.epochs, path)
        networks = train("cnn", torch.ones(args.checkpoints, N_TRAIN, dtype=torch.bool), 99, args.epochs)
        torch.save([network.state_dict() for network in networks], path / "checkpoints.pt")
        np.savez(path / "job.npz", k=args.proj_dim, threads=args.threads)
        results: dict[str, Any] = {}
        for library in args.libraries:
            key = f"{library}-{args.proj_dim}-{args.checkpoints}.json"
            if not (path / key).is_file():
                (path / key).write_text(json.dumps(call(library, path, args.peers, args.lambdas)))
            results[library] = json.loads((path / key).read_text())
            if "error" not in results[library]:
                ours = results["hf_trak"].get("lds") if library != "hf_trak" and "hf_trak" in results else None
                results[library]["lds"] = quality(library, path, masks, outputs, ours)
            print(library, json.dumps(results[library]), file=sys.stderr, flush=True)
        if args.prepare:
            return
        works = [library for library in args.libraries if "error" not in results[library]]
        for library in works:
            results[library]["rounds"] = []
        for _ in range(args.rounds):
            for library in works:
                results[library]["rounds"].append(call(library, path, args.peers, []))
    facts = {
        "machine": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "torch": torch.__version__,
    }
    print(
        f"CNN on digits, n = {N_TRAIN}, k = {args.proj_dim}, {args.checkpoints} checkpoint(s), {args.subsets} halves "
        f"× {args.repeats}, {args.threads} thread(s); medians of {args.rounds} rounds\n"
    )
    print(table(results, N_TRAIN * args.checkpoints))
    if args.json is not None:
        settings = {name: str(value) for name, value in vars(args).items()}
        args.json.write_text(json.dumps({"settings": settings, "facts": facts, "results": results}, indent=2) + "\n")
    if args.plot is not None:
        plot(results, args.plot)


if __name__ == "__main__":
    main()
