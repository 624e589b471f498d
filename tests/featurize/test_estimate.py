"""`hf_trak.estimate` against what really happens: parameters exactly, bytes on disk, memory, time."""

import logging
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from digit_models import DigitNet, digits, make, trained_net
from torch import nn
from trak_options import trak_config
from transformers import GPT2Config, GPT2LMHeadModel

import hf_trak
from hf_trak import TrakAttributor, TrakConfig
from hf_trak.featurize.estimate import estimate
from hf_trak.featurize.estimation import estimate_sizes

N_TRAIN = 61


@pytest.fixture(scope="module")
def nets() -> list[DigitNet]:
    return [trained_net(digits(0, N_TRAIN), seed=seed) for seed in (0, 1)]


def config(**options) -> TrakConfig:
    return trak_config("unused", proj_dim=64, shard_size=16, use_cpu=True, **options)


def bytes_on_disk(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())


def test_parameters_are_exact():
    model = GPT2LMHeadModel(GPT2Config(vocab_size=50, n_positions=16, n_embd=8, n_layer=2, n_head=2))
    everything = sum({parameter.data_ptr(): parameter.numel() for parameter in model.parameters()}.values())
    assert hf_trak.estimate(model, 10).parameters == everything  # tied embeddings count once
    model.transformer.wte.requires_grad_(False)
    frozen = estimate(model, 10)
    assert frozen.parameters == everything - 50 * 8
    assert frozen.model_parameters == everything
    one = estimate(model, 10, TrakConfig(grad_wrt=["transformer.h.0.ln_1.weight"]))
    assert one.parameters == 8


@pytest.mark.few(1)
@pytest.mark.parametrize("options", [{}, {"feature_dtype": "float16"}, {"proj_type": "none"}, {"shard_size": 7}])
def test_bytes_on_disk(nets, tmp_path, options):
    attributor = make(nets[0], tmp_path, digits(0, N_TRAIN), **options).featurize(nets)
    targets = digits(1000, 1040)
    expected = attributor.estimate(targets, checkpoints=2)
    before = bytes_on_disk(tmp_path)
    assert expected.disk_bytes - expected.stages["targets"].disk == pytest.approx(before, rel=0.03)
    attributor.attribute(targets, top_k=1)
    stored = sum(path.stat().st_size for path in (tmp_path / "experiments").rglob("*.safetensors"))
    assert expected.stages["targets"].disk == pytest.approx(stored, rel=0.03)
    shards = sum(path.stat().st_size for path in tmp_path.glob("checkpoint-*/train-*"))
    assert expected.stages["features"].disk == pytest.approx(shards, rel=0.03)
    solvers = ("gram", "kernel")  # XᵀX, or XXᵀ with fewer rows than parameters
    grams = sum(path.stat().st_size for one in solvers for path in tmp_path.glob(f"checkpoint-*/{one}.safetensors"))
    assert expected.stages["solver"].disk == pytest.approx(grams, rel=0.03)
    assert expected.parameters == attributor.features.layout.total


def test_memory_counts_what_is_allocated():
    """A model whose largest layer dominates, at a size where everything else is small beside it."""
    model = nn.Sequential(nn.Linear(1000, 500), nn.Linear(500, 2))
    weights = 4 * (1000 * 500 + 500 + 500 * 2 + 2)
    sizes = estimate(model, 1000, replace(config(), per_device_batch_size=4, shard_size=100))
    checked = 2 * weights  # two gradients of one row
    assert sizes.stages["features"].memory == weights + checked + 4 * 100 * 65 + 4 * 4 * 64 + 4 * 4 * 500_000
    more = estimate(model, 1000, replace(config(), per_device_batch_size=4, shard_size=100), checkpoints=2)
    assert more.stages["features"].memory - sizes.stages["features"].memory == weights
    half = estimate(model, 1000, replace(config(), per_device_batch_size=4, shard_size=100, model_dtype="bfloat16"))
    assert (
        half.stages["features"].memory - sizes.stages["features"].memory == 0
    )  # half the weights, twice: the copy and the cast


@pytest.mark.gpu
def test_memory_on_a_gpu(tmp_path):
    """The bound holds for what featurizing really allocates, and is of the right size."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 20_000), nn.Tanh(), nn.Linear(20_000, 10)).cuda().eval()

    class Wrapped(DigitNet):
        def __init__(self):
            super().__init__()
            self.body, self.head = model[:3], model[3]

    rows = digits(0, 64)
    options = TrakConfig(str(tmp_path), proj_dim=512, shard_size=32, per_device_batch_size=32)
    attributor = TrakAttributor(Wrapped(), options, train_dataset=rows, task="image_classification")
    torch.cuda.reset_peak_memory_stats()
    attributor.featurize()
    peak = torch.cuda.max_memory_allocated()
    expected = attributor.estimate().stages["features"].memory
    assert 0.2 * expected < peak < 1.2 * expected


def test_memory_to_score(nets):
    sizes = estimate(nets[0], 100, replace(config(), proj_dim=100, shard_size=10), eval_dataset=7)
    assert sizes.stages["solver"].memory == 3 * 8 * 100**2 + 7 * 100 * 12 + 10 * 100 * 4


def test_time_is_measured_on_the_rows(nets, tmp_path, monkeypatch):
    """A model that takes a second of a made-up clock per row, and a hundred for the first batch."""
    now = [0.0]
    rows_seen = [0]
    from hf_trak.featurize.featurizer import Featurizer

    features = Featurizer.features_of

    def slow(self, rows, *args, **kwargs):
        now[0] += len(rows) + (100.0 if rows_seen[0] == 0 else 0.0)
        rows_seen[0] += len(rows)
        return features(self, rows, *args, **kwargs)

    monkeypatch.setattr(Featurizer, "features_of", slow)
    monkeypatch.setattr("hf_trak.runtime.progress.time.perf_counter", lambda: now[0])
    attributor = make(nets[0], tmp_path, digits(0, N_TRAIN))
    measured = attributor.estimate(eval_dataset=9, checkpoints=2, measure=True)
    assert measured.rows_per_second == pytest.approx(1.0)
    assert measured.seconds == pytest.approx(2 * (N_TRAIN + 9))
    assert rows_seen[0] == 25  # five batches of five rows, not all
    assert not (tmp_path / "trak_config.json").exists()
    assert "2 min 20 s" in str(measured)
    assert estimate(nets[0], N_TRAIN, config(), processes=4).seconds is None
    shared = estimate_sizes(nets[0], N_TRAIN, config(), processes=4, rows_per_second=2.0)
    assert shared.seconds == pytest.approx(8.0)  # 16 rows in the longest share


def test_measuring_leaves_model_and_store_alone(nets, tmp_path):
    net = trained_net(digits(0, N_TRAIN)).train()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    attributor = make(net, tmp_path / "store", digits(0, N_TRAIN))
    assert attributor.estimate(measure=True).rows_per_second > 0
    assert net.training
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    assert not (tmp_path / "store").exists()


def test_the_log_says_it_at_the_start(nets, tmp_path, caplog):
    with caplog.at_level(logging.INFO, logger="hf_trak"):
        make(nets[0], tmp_path, digits(0, N_TRAIN)).featurize(nets)
    messages = [record.getMessage() for record in caplog.records]
    (said,) = [message for message in messages if "parameters" in message]
    assert re.search(r"1,960 of 1,960 parameters, 64 features, 61 rows, 2 checkpoints\ndisk: 1\d\d\.\d KiB", said)
    assert messages.index(said) < min(i for i, text in enumerate(messages) if "Per-sample gradients" in text)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"train_dataset": 0}, "`train_dataset` is 0"),
        ({"checkpoints": 0}, "`checkpoints` is 0"),
        ({"eval_dataset": -1}, "`eval_dataset` is -1"),
        ({"train_dataset": iter([])}, "Expected a number, or rows that can be counted"),
        ({"measure": True}, "Expected the rows"),
        ({"measure": True, "train_dataset": Dataset.from_dict({"labels": [1, 2]})}, "only 2 training rows"),
    ],
)
def test_what_makes_no_sense(nets, arguments, says):
    with pytest.raises(ValueError, match=says):
        estimate(nets[0], **{"train_dataset": 10, "args": config(), **arguments})


def test_arguments_of_another_kind(nets):
    with pytest.raises(TypeError, match=r"`args` is a dict, the keys \['proj_dim'\].*`TrakConfig\(\*\*args\)`"):
        estimate(nets[0], 10, {"proj_dim": 64})
