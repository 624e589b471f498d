"""TrakConfig validates itself and survives the command line."""

import ast
import json
import re
from dataclasses import MISSING, fields, replace
from typing import Any

import numpy as np
import pytest

from hf_trak import TrakConfig
from hf_trak.cli.parser import parse_yaml_and_args
from hf_trak.config import CurvatureConfig


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("proj_type", "gaussian"),
        ("engine", "fast"),
        ("feature_dtype", "float64"),
        ("model_dtype", "int8"),
        ("proj_dim", 0),
        ("proj_dim", 4.0),
        ("proj_type", "sjlt-0"),
        ("proj_type", "normal-4"),
        ("proj_type", None),
        ("proj_dim", ""),
        ("proj_dim", "0B"),
        ("proj_dim", "512 bytes"),
        ("solver", "low_rank-x"),
        ("solver", "dual-3"),
        ("curvature", 3),
        ("curvature", {"kinds": "ekfac"}),
        ("curvature.kind", "auto"),
        ("curvature.whitened", "yes"),
        ("per_device_batch_size", "large"),
        ("per_device_batch_size", None),
        ("seed", -1),
        ("seed", 2**63),
        ("seed", True),
        ("per_device_batch_size", 0),
        ("shard_size", 0),
        ("lambda_relative", -1.0),
        ("lambda_relative", float("nan")),
        ("lambda_relative", "2e-5"),
        ("lambda_relative", None),
        ("grad_wrt", "lm_head.weight"),
        ("output_dir", ""),
    ],
)
def test_bad_value_names_the_field_and_the_value(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"`{field}` is (the string )?") as info:
        outer, _, inner = field.partition(".")
        TrakConfig(**{outer: {inner: value} if inner else value})  # type: ignore[arg-type]
    assert "Expected" in str(info.value)


def test_command_line_round_trip() -> None:
    given = "--proj_type sjlt-4 --proj_dim 512B --solver low_rank-512 --grad_wrt a.weight b.bias"
    nested = "--curvature kfac --curvature_rows 30 --curvature_damping 0.5 --curvature_whitened"
    (config,) = parse_yaml_and_args(TrakConfig, [*given.split(), *nested.split(), "--per_device_batch_size", "auto"])
    assert config == TrakConfig(
        proj_type="sjlt-4", proj_dim="512B", solver="low_rank-512", grad_wrt=["a.weight", "b.bias"],
        curvature=CurvatureConfig("kfac", rows=30, damping=0.5, whitened=True), per_device_batch_size="auto",
    )  # fmt: skip
    assert TrakConfig(**json.loads(config.to_json_string())) == config
    (numbers,) = parse_yaml_and_args(TrakConfig, ["--proj_dim", "64", "--per_device_batch_size", "3"])
    assert (numbers.proj_dim, numbers.per_device_batch_size) == (64, 3)
    (remembered,) = parse_yaml_and_args(TrakConfig, ["--curvature_rows", "9"], defaults=config.to_dict())
    assert remembered == replace(config, curvature=replace(config.curvature, rows=9))


def test_texts_are_taken_apart() -> None:
    plain, named = TrakConfig(), TrakConfig(proj_type="sjlt-4", proj_dim="512B", solver="low_rank-512")
    assert (plain.projection, plain.nonzeros, plain.solver_kind, plain.solver_rank) == ("sjlt", 1, "auto", None)
    assert (named.projection, named.nonzeros, named.solver_kind, named.solver_rank) == ("sjlt", 4, "low_rank", 512)
    assert (named.width, named.storage, plain.factored_dim) == (2048, "int2", 128)
    assert TrakConfig(proj_type="factored-64").factored_dim == 64
    assert (plain.batch_size, TrakConfig(per_device_batch_size="auto").batch_size) == (16, 16)


def test_a_curvature_is_given_in_three_ways() -> None:
    expected = CurvatureConfig(kind="kfac")
    for given in (expected, "kfac", {"kind": "kfac"}):
        assert TrakConfig(curvature=given).curvature == expected  # type: ignore[arg-type]
    assert CurvatureConfig().sample_size(10) == 10 and CurvatureConfig().sample_size(10**6) == 4096
    assert CurvatureConfig(rows=7).sample_size(10) == 7


def test_help_is_the_first_sentence_of_every_field(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_yaml_and_args(TrakConfig, ["--help", "all"])
    text = " ".join(capsys.readouterr().out.split())
    assert "Directory of the feature store. (default: trak)" in text
    assert "Damping c, relative to the mean of each block's eigenvalues." in text
    assert "--curvature_rows ROWS Number of training rows" in text


@pytest.mark.parametrize("kind", [TrakConfig, CurvatureConfig])
def test_the_docstring_describes_every_field_with_its_default(kind: Any) -> None:
    documented = re.findall(r"^ {8}(\w+) \(`.+`, \*optional\*(?:, defaults to (.+))?\):$", kind.__doc__ or "", re.M)
    assert [name for name, _ in documented] == [field.name for field in fields(kind)]
    for (name, default), field in zip(documented, fields(kind), strict=True):
        if field.default_factory is not MISSING:
            assert default == "`CurvatureConfig()`"
        else:
            assert (ast.literal_eval(default.strip("`")) if default else None) == field.default, name


def test_other_kinds_of_integers_become_plain_ones() -> None:
    config = TrakConfig(proj_dim=np.int64(8), seed=np.uint32(3))  # type: ignore[arg-type]
    assert type(config.proj_dim) is int and type(config.seed) is int
    assert '"proj_dim": 8' in config.to_json_string()
