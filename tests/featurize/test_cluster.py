"""What an index takes on several machines: by independent arithmetic, on a real store, and from the command line."""

import json
from pathlib import Path

import pytest
from digit_models import digits, make, trained_net
from torch import nn

from hf_trak import TrakConfig
from hf_trak.cli.main import main
from hf_trak.featurize.cluster import DECODE_SECONDS, GRAM_SECONDS, MULTIPLY_SECONDS, cluster_cost
from hf_trak.featurize.estimation import Estimate, estimate_sizes


def sizes(n: int, m: int, processes: int = 64, rate: float | None = 500.0, checkpoints: int = 1) -> Estimate:
    args = TrakConfig(proj_dim=1024, feature_dtype="int4", shard_size=65_536)
    return estimate_sizes(
        nn.Linear(100, 100),
        n,
        args,
        eval_dataset=m,
        processes=processes,
        rows_per_second=rate,
        checkpoints=checkpoints,
    )


def test_a_billion_rows_by_hand():
    cost = cluster_cost(sizes(10**9, 100, checkpoints=2), nodes=8, read_bandwidth=5e9, price=4.0)
    each = 1024 // 2 + 4 + 4  # codes of 4 bits, their scale, and q
    assert cost.index_bytes == pytest.approx(2 * 10**9 * each, rel=1e-4)  # and a header per shard
    assert cost.featurize_seconds == pytest.approx(2 * (10**9 + 100) / 64 / 500, rel=1e-6)
    assert cost.gram_seconds == pytest.approx(2 * 256 * 1024 * 1024**2 * GRAM_SECONDS / 64)  # of a sample
    assert cost.read_seconds == pytest.approx(2 * 10**9 * each / 40e9, rel=1e-4)
    assert cost.multiply_seconds == pytest.approx(2 * 10**9 * 1024 * (DECODE_SECONDS + 100 * MULTIPLY_SECONDS) / 64)
    assert cost.score_seconds == cost.multiply_seconds > cost.read_seconds  # 64 threads multiply more slowly than that
    total = cost.featurize_seconds + cost.gram_seconds + cost.multiply_seconds
    assert cost.money == pytest.approx(4.0 * 8 * total / 3600)
    assert "multiplying" in str(cost) and f"{cost.money:,.2f} at 4.00" in str(cost)


def test_slow_disks_decide_and_nothing_is_made_up():
    cost = cluster_cost(sizes(10**6, 0, rate=None), nodes=1, read_bandwidth=1e7, price=4.0)
    assert cost.score_seconds == cost.read_seconds > cost.multiply_seconds
    assert cost.featurize_seconds is None and cost.money is None and "featurize unknown" in str(cost)


def test_bytes_of_the_index_are_those_of_a_store(tmp_path: Path):
    attributor = make(trained_net(digits(0, 200), seed=0), tmp_path, digits(0, 200), shard_size=100).featurize()
    cost = cluster_cost(attributor.estimate(), nodes=1, read_bandwidth=5e9)
    written = sum(path.stat().st_size for path in tmp_path.glob("checkpoint-0/train-*.safetensors"))
    assert cost.index_bytes == pytest.approx(written, rel=0.01)


@pytest.mark.parametrize(
    "given, says",
    [
        ({"nodes": 0}, "`nodes` is 0"),
        ({"nodes": 65}, "`num_processes` is 64, and `nodes` is 65"),
        ({"read_bandwidth": 0.0}, "`read_bandwidth` is 0.0"),
        ({"price": float("nan")}, "`price_per_hour` is nan"),
    ],
)
def test_numbers_out_of_range(given, says):
    with pytest.raises(ValueError, match=says):
        cluster_cost(sizes(1000, 1), **{"nodes": 1, "read_bandwidth": 5e9, **given})


def test_the_command_line(tmp_path: Path, capsys, monkeypatch):
    monkeypatch.setattr("hf_trak.cli.estimate.load_model", lambda *_: nn.Linear(100, 100))
    asked = ["estimate", "--model", "x", "--train_size", "1000000", "--proj_dim", "1024", "--feature_dtype", "int4"]
    more = ["--nodes", "4", "--num_processes", "16", "--rows_per_second", "100", "--price_per_hour", "2"]
    assert main([*asked, *more, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["cluster"]
    assert found["featurize_seconds"] == pytest.approx(10**6 / 16 / 100)
    assert found["money"] == pytest.approx(
        2 * 4 * (found["featurize_seconds"] + found["gram_seconds"] + found["score_seconds"]) / 3600
    )
    assert main([*asked, *more]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("4 nodes, 16 processes: index ")
    assert main([*asked, "--rows_per_second", "-1"]) == 1
    assert "`rows_per_second` is -1.0" in capsys.readouterr().err
