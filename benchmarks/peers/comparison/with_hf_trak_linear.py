"""hf_trak on what bergson takes: the linear layers, in batches of as many tokens."""

from torch import nn
from transformers.pytorch_utils import Conv1D

from comparison.cases import LENGTH
from comparison.job import Clock, Job, Scores
from comparison.with_hf_trak import attribute as attribute_all

TOKENS = 2048
"""bergson's default."""


def attribute(job: Job, clock: Clock) -> Scores:
    layers = {
        name: module
        for name, module in job.models[0].named_modules()
        if isinstance(module, nn.Linear | Conv1D | nn.Conv2d) and not name.endswith("lm_head")
    }
    names = [f"{name}.{own}" for name, module in layers.items() for own, _ in module.named_parameters(recurse=False)]
    rows = TOKENS // LENGTH if "input_ids" in job.case.inputs else job.batch_size
    return attribute_all(job, clock, grad_wrt=names, per_device_batch_size=rows)
