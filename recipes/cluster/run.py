"""Features, tables and scores on a Ray cluster, or by two workers of this machine.

    python recipes/cluster/run.py                                            # starts two workers here
    python recipes/cluster/run.py --address auto --workers 8 --parts 15   # on the head of a cluster

All nodes see `output_dir`. Replace `digits.py` by your own. See README.md beside this file.
"""

import argparse
from pathlib import Path
from typing import Any

import ray
from digits import Network, attributor, data, train

from hf_trak import TrakAttributor
from hf_trak.engines.ray import RayEngine
from hf_trak.store.store import FeatureStore
from hf_trak.store.tables import write_table


class Featurizer:
    """An actor, which loads the model once and computes the features of parts of the rows."""

    def __init__(self, directory: Path, parts: int) -> None:
        self.attributor, self.parts = attributor(directory), parts
        self.weights = directory / "model.safetensors"

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        for part in batch["part"]:
            self.attributor.featurize({0: self.weights}, part=(int(part), self.parts))
        return batch


def write_tables(batch: dict[str, Any], directory: Path, parts: int) -> dict[str, Any]:
    """Write parts of the features as tables, with the labels of their rows."""
    store, labels = FeatureStore.load(directory / "trak"), data()[0].select_columns(["labels"])
    for part in batch["part"]:
        write_table(store, 0, directory / "tables" / f"{part:05}.parquet", labels, part=(int(part), parts))
    return batch


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output_dir", type=Path, default=Path("outputs/cluster"), help="a directory of all nodes")
    parser.add_argument("--address", default="local", help="of a cluster, `auto` on its nodes; starts Ray by default")
    parser.add_argument("--workers", type=int, default=2, help="actors at a time")
    parser.add_argument("--parts", type=int, default=5, help="parts of the rows, at most one for each shard")
    parser.add_argument("--top_k", type=int, default=10)
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    args = parse_arguments(arguments)
    directory = args.output_dir.absolute()
    here = {"num_cpus": args.workers, "include_dashboard": False} if args.address == "local" else {}
    ray.init(args.address, runtime_env={"working_dir": str(Path(__file__).parent)}, **here)  # which has `digits.py`
    train(directory / "model.safetensors")
    given = (directory, args.parts)
    parts = ray.data.from_items([{"part": part} for part in range(args.parts)], override_num_blocks=args.parts)
    actors = ray.data.ActorPoolStrategy(size=args.workers)
    parts.map_batches(Featurizer, fn_constructor_args=given, batch_size=1, compute=actors).materialize()
    parts.map_batches(write_tables, fn_args=given, batch_size=1).materialize()  # once all features are there
    where = {"checkpoints": {0: directory / "model.safetensors"}, "output_dir": str(directory / "answers")}
    ready = TrakAttributor.from_pretrained(str(directory / "tables"), Network(), use_cpu=True, **where)
    ready.features.scored_by = RayEngine(num_cpus=1)
    scored = ready.attribute(data()[1], top_k=args.top_k)
    scored.to_parquet(directory / "best.parquet")
    print(f"The best {args.top_k} rows of {len(scored)} targets: {directory / 'best.parquet'}")


if __name__ == "__main__":
    main()
