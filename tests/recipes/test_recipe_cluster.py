"""The recipe for Ray: features and scores of two workers have the bits of one process; the cluster's file is valid."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pyarrow.parquet as pq
import pytest
import yaml

pytest.importorskip("ray")
pytestmark = pytest.mark.slow

RECIPE = Path(__file__).parents[2] / "recipes/cluster"


def digits() -> ModuleType:
    spec = importlib.util.spec_from_file_location("digits", RECIPE / "digits.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules["digits"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_two_workers_compute_what_one_process_does(tmp_path: Path) -> None:
    environment = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, str(RECIPE / "run.py"), "--output_dir", str(tmp_path), "--top_k", "5"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    module = digits()
    (tmp_path / "alone").mkdir()
    one = module.attributor(tmp_path / "alone").featurize({0: tmp_path / "model.safetensors"})
    files = sorted((tmp_path / "alone/trak/checkpoint-0").glob("train-*"))
    assert len(files) == 15
    for path in files:
        assert (tmp_path / "trak/checkpoint-0" / path.name).read_bytes() == path.read_bytes()
    scored = one.attribute(module.data()[1], top_k=5, method="index")
    best = pq.read_table(tmp_path / "best.parquet")
    for name in ("trak_indices", "trak_scores"):
        assert best.column(name).to_pylist() == scored[name][:]
    tables = [pq.read_table(path) for path in sorted((tmp_path / "tables").iterdir())]
    assert [label for table in tables for label in table["labels"].to_pylist()] == module.data()[0]["labels"][
        :
    ].tolist()


def test_the_cluster_is_one_that_ray_knows() -> None:
    autoscaler: Any = pytest.importorskip("ray.autoscaler._private.util")
    cluster = yaml.safe_load((RECIPE / "cloud/cluster.yaml").read_text(encoding="utf-8"))
    autoscaler.validate_config(autoscaler.prepare_config(cluster))
    with pytest.raises(Exception, match="worker_nodes_typo"):
        autoscaler.validate_config(autoscaler.prepare_config({**cluster, "worker_nodes_typo": 1}))
