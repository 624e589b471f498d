"""bergson 2.5.1: its pipeline of EK-FAC, with labels drawn from the model, biases, and damping as on its board."""

import copy
from pathlib import Path
from typing import Any

import torch
from bergson import DataConfig, IndexConfig, PreprocessConfig, QuerySetConfig
from bergson.cli.commands import Hessian
from bergson.config.config import HessianConfig, HessianPipelineConfig, InversionConfig, ScoreConfig
from bergson.hessians import hessian_approximations, pipeline
from datasets import disable_progress_bars
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from curvature_bench.measure import Meter
from curvature_bench.stages import BASES, EIGEN, EIGENVALUES, FIT, SCORES, SCORING, TARGETS
from curvature_bench.work import Work


def run(work: Work, meter: Meter, directory: Path) -> None:
    """Fit the factors, and score all rows for every target."""
    disable_progress_bars()
    model = work.model()
    tokens = work.batch_size * model.config.n_positions  # type: ignore[operator, union-attr]
    _save(_longer(model, tokens), directory / "model")
    for name, part in zip(("train", "targets"), work.datasets(), strict=True):
        part.remove_columns("attention_mask").save_to_disk(directory / name)

    def config(name: str) -> IndexConfig:
        return IndexConfig(
            run_path=str(directory / name),
            model=str(directory / "model"),
            data=DataConfig(dataset=str(directory / "train")),
            token_batch_size=tokens,
            include_bias=True,
            precision="fp32",
        )

    hessian = HessianConfig("kfac", ev_correction=True)
    with (
        meter.stages(FIT),
        meter.calls(hessian_approximations, "collect_hessians", _stage_of_pass),
        meter.calls(hessian_approximations, "eigendecompose_owned", EIGEN),
    ):
        Hessian(hessian, config("run/hessian/kfac")).execute()
    query = QuerySetConfig(dataset=str(directory / "targets"))
    options = HessianPipelineConfig(query=query, inversion_cfg=InversionConfig(damping_factor=0.1), resume=True)
    with meter.stages(SCORING, rest=TARGETS), meter.calls(pipeline, "score_dataset", SCORES):
        pipeline.hessian_pipeline(config("run"), hessian, ScoreConfig(), PreprocessConfig(), options)


def _stage_of_pass(*_: Any, ev_correction: bool = False, **__: Any) -> str:
    return EIGENVALUES if ev_correction else BASES


def _save(model: Any, directory: Path) -> None:
    """The model, and a tokenizer, which the library loads though the rows are tokens already."""
    model.save_pretrained(directory)
    tokenizer = Tokenizer(models.WordLevel({"[UNK]": 0}, unk_token="[UNK]"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]").save_pretrained(directory)


def _longer(model: Any, positions: int) -> Any:
    """A GPT-2 with more positions, which a batch must not have more tokens than; they are never used."""
    config = copy.deepcopy(model.config)
    config.n_positions = positions
    bigger = type(model)(config)
    weights = dict(model.state_dict())
    places: torch.Tensor = weights["transformer.wpe.weight"]
    added = places.new_zeros(positions - places.shape[0], places.shape[1])
    weights["transformer.wpe.weight"] = torch.cat([places, added])
    bigger.load_state_dict(weights)
    return bigger
