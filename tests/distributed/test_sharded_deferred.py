"""Deferred logits of models that FSDP2 divides: the features of whole models and of whole logits, in all processes."""

from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from sharded_jobs import attributor, blocks, difference, features, in_group, made, mesh_of_all, sharded
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from hf_trak import TrakAttributor
from hf_trak.modelout_functions import CausalLMModelOutput, deferred_logits
from hf_trak.modelout_functions import margins as deferred_margins

pytestmark = [pytest.mark.distributed, pytest.mark.usefixtures("jobs_with_one_thread")]

ROUNDING = 1e-5
"""Features are sums over parameters of products that take 10 to 10⁴ additions in float32 (ε = 6·10⁻⁸)."""


class Squared(CausalLMModelOutput):
    """A task that needs whole logits of rows of even length."""

    def output(self, model_output: Any, batch: Any, side: Any = "train") -> Tensor:
        values = super().output(model_output, batch, side)
        return values if batch["input_ids"].shape[1] % 2 else values + model_output.logits.square().sum(dim=(1, 2))


def divided(kind: str) -> nn.Module:
    mesh, model = mesh_of_all(), made("llama")
    if kind == "root":
        return sharded(model, mesh)
    for block in blocks(model):
        fully_shard(block, mesh=mesh)
    if kind == "alone":  # and freed after its forward pass
        fully_shard(model.lm_head, mesh=mesh, reshard_after_forward=True)
    return fully_shard(model, mesh=mesh, reshard_after_forward=True)


def every_kind(directory: Path) -> dict[str, Any]:
    """Rows alone in their batches, each of another length, so that some processes defer and others do not."""
    calls: list[int] = []
    original = deferred_margins._summed
    deferred_margins._summed = lambda *args: calls.append(0) or original(*args)
    ids = [[1 + (i * j) % 30 for j in range(3 + i)] for i in range(7)]
    rows, found = Dataset.from_dict({"input_ids": ids, "labels": ids}), {}
    for task in (CausalLMModelOutput, Squared):
        whole: Tensor | None = None
        for name, limit in (("whole", 2**60), ("root", 0), ("freed", 0), ("alone", 0), ("mixed", 2 * 5 * 40 * 4 + 1)):
            deferred_logits.DEFERRED_FROM, calls[:] = limit, []
            if task is Squared and name in ("freed", "mixed"):
                continue
            model = made("llama") if name == "whole" else divided(name)
            results = []
            for again in range(2 if name == "root" else 1):
                where = directory / task.__name__ / f"{name}-{again}"
                one = attributor(model, "llama", where, per_device_batch_size=1)
                given = TrakAttributor(model, one.args, train_dataset=rows, task=task())
                results.append(features(given.featurize()))
            whole = results[0] if whole is None else whole
            found[f"{task.__name__}, {name}"] = {
                "difference": difference(results[0], whole),
                "same bits": all(torch.equal(results[0], other) for other in results),
                "deferred": len(calls),
                "sharded": [n for n, p in model.named_parameters() if not hasattr(p, "placements")],
            }
    return found


@pytest.mark.slow
def test_features_are_those_of_whole_logits(tmp_path: Path) -> None:
    found = in_group(tmp_path, every_kind)
    for name, one in found[0].items():
        kind = name.split(", ")[1]
        assert one["difference"] <= ROUNDING and one["same bits"], (name, one)
        deferred = sum(rank[name]["deferred"] for rank in found)
        assert (deferred == 0) == (kind == "whole"), (name, one)
        assert kind == "whole" or not one["sharded"], (name, one)
