"""Features as codes, from `featurize` to scores: same bits, whatever happens on the way, and scores of the float index
within what the codes' noise explains."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from digit_models import DigitNet, digits, full_scores, make, relative_error, trained_net
from rounding import gamma
from scipy.stats import spearmanr
from store_jobs import Job, start_group

from hf_trak import TrakAttributor, TrakConfig
from hf_trak.errors import ConfigMismatchError, StoreError
from hf_trak.store.codes import CodedRows
from hf_trak.store.store import FeatureStore

N, K = 61, 300


@pytest.fixture(scope="module")
def net() -> DigitNet:
    return trained_net(digits(0, N))


def coded(net: DigitNet, directory: Path, dtype: str = "int1", **options) -> TrakAttributor:
    return make(net, directory, digits(0, N), **{"proj_dim": K, "feature_dtype": dtype, **options})


def features(attributor: TrakAttributor, model_id: int = 0) -> torch.Tensor:
    return torch.cat([shard.grads for shard in attributor.features.store.train(model_id)])


@pytest.fixture(scope="module")
def float_store(net, tmp_path_factory) -> TrakAttributor:
    return coded(net, tmp_path_factory.mktemp("float"), "float32").featurize()


@pytest.mark.few(2)
@pytest.mark.parametrize("dtype", ["int8", "int4", "int2", "int1"])
def test_the_store_holds_codes_of_the_rotated_features(net, float_store, tmp_path, dtype):
    attributor = coded(net, tmp_path, dtype).featurize()
    store = attributor.features.store
    rotated = store.rotation(0).apply(features(float_store))
    expected = CodedRows.encode(rotated, store.code_format)
    torch.testing.assert_close(features(attributor), expected.decode(), rtol=0, atol=0)
    size = sum(path.stat().st_size for path in (tmp_path / "checkpoint-0").glob("train-*"))
    assert size <= N * (store.code_format.row_bytes + 8) + 4 * 2048  # codes, scale and q, and four headers


@pytest.mark.few(2)
@pytest.mark.parametrize("dtype", ["int8", "int4", "int2", "int1"])
def test_scores_are_those_of_the_decoded_features(net, tmp_path, dtype):
    attributor = coded(net, tmp_path, dtype).featurize()
    found = full_scores(attributor, digits(200, 208), name="targets")
    shards = list(attributor.features.store.train(0))
    rows = torch.cat([shard.coded.decode() for shard in shards]).double()
    q = torch.cat([shard.out_to_loss for shard in shards]).double()
    targets = torch.cat([shard.grads for shard in attributor.features.store.saved_targets("targets", 0)]).double()
    gram = rows.T @ rows
    lam = attributor.args.lambda_relative * gram.trace() / min(N, K)
    inverse = torch.linalg.inv(gram + lam * torch.eye(K, dtype=torch.float64))
    expected = (rows @ inverse @ targets.T) * q[:, None]
    # Targets are preconditioned in float64 and multiplied in float32: K + 3 roundings, relative to sums of sizes.
    sizes = (rows.abs() @ (inverse @ targets.T).abs()) * q[:, None]
    assert (torch.as_tensor(found).double() - expected).abs().le(gamma(K + 3) * sizes).all()
    influence = ((rows @ inverse) * rows).sum(1) * q
    assert relative_error(attributor.self_influence(), influence) < 1e-6


@pytest.mark.slow
def test_scores_are_near_those_of_float_features(net, tmp_path):
    """More bits are nearer, and 8 bits as near as the rounding of features, which is below 1 %."""
    targets = digits(200, 208)
    expected = full_scores(coded(net, tmp_path / "float32", "float32", proj_dim=2048).featurize(), targets)
    ranks, errors = [], []
    for dtype in ("int1", "int2", "int4", "int8"):
        found = full_scores(coded(net, tmp_path / dtype, dtype, proj_dim=2048).featurize(), targets)
        ranks.append(np.mean([spearmanr(found[:, j], expected[:, j])[0] for j in range(8)]))
        errors.append(relative_error(found, expected))
    assert ranks == sorted(ranks)
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 0.01
    assert ranks[0] > 0.5


def test_targets_are_rotated_and_stay_float32(net, float_store, tmp_path):
    attributor = coded(net, tmp_path).featurize()
    for one in (attributor, float_store):
        one.attribute(digits(200, 208), top_k=3, name="targets")
    plain = torch.cat([shard.grads for shard in float_store.features.store.saved_targets("targets", 0)])
    turned = torch.cat([shard.grads for shard in attributor.features.store.saved_targets("targets", 0)])
    assert turned.dtype == torch.float32
    torch.testing.assert_close(turned, attributor.features.store.rotation(0).apply(plain), rtol=0, atol=0)


@pytest.mark.slow
def test_everything_that_reads_features_reads_codes(net, tmp_path):
    attributor = coded(net, tmp_path, "int4").featurize()
    targets = digits(200, 209)
    decoded = features(attributor).double()
    scores = full_scores(attributor, targets)
    grouped = attributor.group_scores(targets, "source")
    assert len(grouped) == 9
    assert len(attributor.select(5, targets)) == 5
    assert torch.isfinite(attributor.self_influence()).all()
    torch.testing.assert_close(
        attributor.features.store.read_gram(0).matrix, decoded.T @ decoded, rtol=1e-10, atol=1e-10
    )
    # Rows that are left out and added keep the codes that they have.
    revised = attributor.exclude([0, 5, 17]).extend(digits(N, N + 4))
    kept = [row for row in range(N) if row not in (0, 5, 17)]
    torch.testing.assert_close(features(revised)[: N - 3], features(attributor)[kept], rtol=0, atol=0)
    assert full_scores(revised, targets).shape == (N + 1, 9)
    fresh = make(net, tmp_path / "fresh", revised.train_dataset, proj_dim=K, feature_dtype="int4")
    assert relative_error(full_scores(revised, targets), full_scores(fresh.featurize(), targets)) < 1e-4
    assert scores.shape == (N, 9)


def test_a_lost_shard_comes_back_with_the_same_bits(net, tmp_path):
    coded(net, tmp_path, "int2").featurize()
    shard = tmp_path / "checkpoint-0" / "train-00002-of-00004.safetensors"
    before = shard.read_bytes()
    shard.unlink()
    gram = tmp_path / "checkpoint-0" / "gram.safetensors"
    gram.unlink()
    coded(net, tmp_path, "int2", per_device_batch_size=3).featurize()
    again = FeatureStore.load(tmp_path).train(0).read(2)
    shutil.copy(shard, tmp_path / "other")
    shard.write_bytes(before)
    first = FeatureStore.load(tmp_path).train(0).read(2)
    # Another batch size rounds features differently, which may move an entry across the border of two levels.
    levels = [torch.cat(one.coded.blocks, 1) for one in (again, first)]
    assert (levels[0] != levels[1]).float().mean() < 0.01
    shard.unlink()
    gram.unlink()
    coded(net, tmp_path, "int2").featurize()
    assert shard.read_bytes() == before


def test_changed_features_are_noticed_before_a_shard_is_written(net, tmp_path):
    coded(net, tmp_path).featurize()
    (tmp_path / "checkpoint-0" / "train-00002-of-00004.safetensors").unlink()
    other = coded(net, tmp_path)
    features_of = type(other.features.featurizer()).features_of

    def changed(self, rows, *args, **kwargs):
        grads, q = features_of(self, rows, *args, **kwargs)
        return grads.roll(1, dims=1), q

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hf_trak.featurize.featurizer.Featurizer.features_of", changed)
        with pytest.raises(ConfigMismatchError, match="differ by"):
            other.featurize()


def test_another_storage_is_refused_also_where_it_is_the_default(net, tmp_path):
    coded(net, tmp_path, "float32", proj_dim=2048).featurize()
    assert make(net, tmp_path, digits(0, N), proj_dim=2048).args.storage == "int4"
    with pytest.raises(ConfigMismatchError, match="feature_dtype"):
        make(net, tmp_path, digits(0, N), proj_dim=2048).featurize()


@pytest.mark.parametrize("tensor", ["scale", "codes.00", "out_to_loss"])
def test_a_changed_byte_is_noticed(net, tmp_path, tensor):
    from safetensors import safe_open

    attributor = coded(net, tmp_path).featurize()
    path = tmp_path / "checkpoint-0" / "train-00001-of-00004.safetensors"
    data = bytearray(path.read_bytes())
    begin = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:begin])
    start, _ = header[tensor]["data_offsets"]
    data[begin + start + 1] ^= 1
    path.write_bytes(data)
    with safe_open(path, framework="pt") as file:
        assert tensor in file.keys()  # noqa: SIM118
    with pytest.raises(StoreError, match="checksum"):
        features(attributor)


def test_another_dtype_in_the_same_directory_is_refused(net, tmp_path):
    coded(net, tmp_path, "int2").featurize()
    with pytest.raises(ConfigMismatchError, match="feature_dtype"):
        coded(net, tmp_path, "int1").featurize()


@pytest.mark.parametrize(
    ("key", "value", "match"),
    [
        ("rotation", "hadamard-9", "rotation"),
        ("levels", "levels-9", "levels"),
        ("format_version", 2, "format version 2, expected 1"),
        ("seed", -1, "seed"),
    ],
)
def test_a_configuration_of_other_codes_is_refused(net, tmp_path, key, value, match):
    from hf_trak.store.sealed import sealed_bytes

    config = coded(net, tmp_path / "a").featurize().features.store.config
    directory = tmp_path / "b"
    directory.mkdir()
    (directory / "trak_config.json").write_bytes(sealed_bytes({**config, key: value}))
    with pytest.raises(StoreError, match=match):
        FeatureStore.load(directory)


def test_a_budget_of_bytes():
    assert (TrakConfig().width, TrakConfig().storage) == (4096, "int4")
    assert TrakConfig(proj_dim=64).storage == "float32"
    assert TrakConfig(proj_type="none").storage == "float32"
    budget = TrakConfig(proj_dim="1024B")
    assert (budget.width, budget.storage) == (4096, "int2")
    assert TrakConfig(proj_dim="1024B", feature_dtype="int8").width == 1024
    assert TrakConfig(proj_dim="1024B", feature_dtype="float32").width == 256
    again = replace(budget, output_dir="elsewhere")
    assert (again.width, again.storage) == (budget.width, budget.storage)
    with pytest.raises(ValueError, match="`proj_dim` is"):
        TrakConfig(proj_dim="1B", feature_dtype="float32")
    with pytest.raises(ValueError, match="`proj_dim` is"):
        TrakConfig(proj_dim="0B")


def write_codes(directory: Path) -> None:
    attributor = make(trained_net(digits(0, N)), directory, digits(0, N), proj_dim=K, feature_dtype="int1")
    full_scores(attributor.featurize(), digits(200, 204))


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.usefixtures("jobs_with_one_thread")
def test_two_processes_write_the_same_codes(tmp_path):
    alone, two = tmp_path / "alone", tmp_path / "two"
    assert Job(tmp_path / "report.json", write_codes, alone).wait(300) == {"value": None}
    jobs = start_group(tmp_path, 2, write_codes, two, timeout=120)
    assert [job.wait(300) for job in jobs] == [{"value": None}] * 2
    written = [
        {path.name: path.read_bytes() for path in sorted((place / "checkpoint-0").glob("*.safetensors"))}
        for place in (alone, two)
    ]
    assert written[0] == written[1]
