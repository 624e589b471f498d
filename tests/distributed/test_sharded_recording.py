"""Runs of models that FSDP2 divides over processes are recorded, and replayed where the model is whole."""

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import DistributedType, PartialState
from replay_runs import RowWeights, config, differences, outputs, recorded, replayed, tiny, trainer
from sharded_jobs import in_group
from transformers import Trainer

from hf_trak import TrakAttributor
from hf_trak.errors import HfTrakError
from hf_trak.featurize.pricing import recorded_run
from hf_trak.methods import Replay
from hf_trak.trajectory.record import RunRecord

pytestmark = [pytest.mark.slow, pytest.mark.distributed, pytest.mark.usefixtures("jobs_with_one_thread")]

PLAIN = Replay(of="run", smoothing=0.0)

DIVIDED: dict[str, Any] = {
    "fsdp": True,
    "fsdp_config": {
        "version": 2, "auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "transformer_layer_cls_to_wrap": ["GPT2Block"],
    },
}  # fmt: skip


def weighted() -> Any:
    model = tiny()
    model.loss_function = RowWeights()
    return model


def fsdp_trainer(*given: Any, **options: Any) -> Trainer:
    # accelerate 1.15 leaves FSDP out for processes on CPUs: it is told here that they are on GPUs
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    return Trainer(*given, **options)


def train_divided(directory: Path) -> dict[str, Any]:
    """Train with a row for each of two processes in a batch, keep the weights as a whole, and ask for a replay."""
    run = recorded(directory, weighted(), kind=fsdp_trainer, per_device_train_batch_size=1, every=3, **DIVIDED)
    divided: Any = run.model
    last = {name: value.full_tensor() for name, value in divided.state_dict().items()}
    if run.args.process_index == 0:
        torch.save(last, directory / "last.pt")
    attributor = TrakAttributor.from_trainer(run, config(directory))
    with pytest.raises(HfTrakError, match="Load the model unsharded"):
        replayed(run, directory, PLAIN)
    return {
        "kinds": sorted({type(one).__name__ for one in divided.parameters()}),
        "record for auto": recorded_run(attributor.features) is not None,
    }


def test_a_run_under_fsdp2_is_recorded_and_replayed(tmp_path: Path) -> None:
    """The truth is one process with the same batches, whose rows are weighted in turn."""
    for found in in_group(tmp_path, train_divided):
        assert found == {"kinds": ["DTensor"], "record for auto": False}
    model = weighted()
    model.load_state_dict(torch.load(tmp_path / "last.pt", weights_only=True))
    record = RunRecord.open(tmp_path / "trak" / "trajectory" / "run")
    assert record.states() == [0, 3, 6, 9]
    run = trainer(tmp_path, model)
    assert recorded_run(TrakAttributor.from_trainer(run, config(tmp_path)).features) == Replay(of="run")
    found = torch.tensor(replayed(run, tmp_path, PLAIN)["trak_scores"], dtype=torch.float64)

    def train() -> torch.Tensor:
        alone = tiny()
        alone.loss_function = weights
        other = trainer(tmp_path, alone)
        other.train()
        return outputs(other.model)

    weights = RowWeights()
    measured = differences(weights, train)
    assert float((found - measured).abs().max() / measured.abs().max()) <= 1e-6
