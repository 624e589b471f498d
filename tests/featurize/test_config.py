"""TrakConfig validates itself and survives the command line."""

import ast
import re

import numpy as np
import pytest
from transformers import HfArgumentParser

from hf_trak import TrakConfig


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("proj_type", "gaussian"),
        ("engine", "fast"),
        ("feature_dtype", "float64"),
        ("model_dtype", "int8"),
        ("proj_dim", 0),
        ("proj_dim", 4.0),
        ("proj_nonzeros", 0),
        ("seed", -1),
        ("seed", True),
        ("max_block_bytes", 0),
        ("per_device_batch_size", 0),
        ("shard_size", 0),
        ("lambda_reg", -1.0),
        ("lambda_reg", float("nan")),
        ("lambda_relative", "2e-5"),
        ("lambda_relative", None),
        ("grad_wrt", "lm_head.weight"),
        ("output_dir", ""),
    ],
)
def test_bad_value_names_the_field_and_the_value(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"`{field}` is (the string )?") as info:
        TrakConfig(**{field: value})  # type: ignore[arg-type]
    assert "Expected" in str(info.value)


def test_command_line_round_trip() -> None:
    parser = HfArgumentParser(TrakConfig)
    (config,) = parser.parse_args_into_dataclasses(
        ["--proj_type", "rademacher", "--proj_dim", "64", "--lambda_reg", "1e-3", "--grad_wrt", "a.weight", "b.bias"]
    )
    assert config == TrakConfig(proj_type="rademacher", proj_dim=64, lambda_reg=1e-3, grad_wrt=["a.weight", "b.bias"])
    assert "--lambda_relative" in parser.format_help()


def test_every_field_has_a_help_text() -> None:
    missing = [name for name, field in TrakConfig.__dataclass_fields__.items() if not field.metadata.get("help")]
    assert missing == []


def test_the_docstring_describes_every_field_with_its_default() -> None:
    documented = re.findall(
        r"^ {8}(\w+) \(`[^`]+`, \*optional\*(?:, defaults to (.+))?\):$", TrakConfig.__doc__ or "", re.M
    )
    fields = TrakConfig.__dataclass_fields__.values()
    assert [name for name, _ in documented] == [field.name for field in fields]
    for (name, default), field in zip(documented, fields, strict=True):
        assert (ast.literal_eval(default.strip("`")) if default else None) == field.default, name


def test_other_kinds_of_integers_become_plain_ones() -> None:
    config = TrakConfig(proj_dim=np.int64(8), seed=np.uint32(3))  # type: ignore[arg-type]
    assert type(config.proj_dim) is int and type(config.seed) is int
    assert '"proj_dim": 8' in config.to_json_string()
