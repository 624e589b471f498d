"""Every YAML file of the recipes through the parser that the recipe uses."""

import importlib.util
import sys
from dataclasses import fields, is_dataclass
from pathlib import Path

import pytest
import yaml
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils import DeepSpeedPlugin
from accelerate.utils.launch import prepare_deepspeed_cmd_env

from hf_trak.cli import parser

RECIPES = Path(__file__).parents[2] / "recipes"
CONFIGS = sorted(path for path in RECIPES.glob("*/*.yaml") if (path.parent / "run.py").is_file())


class ParsedError(Exception):
    """Ends a recipe once its arguments are there."""


@pytest.fixture
def arguments(monkeypatch):
    """Runs a recipe's `main` up to its call of the parser, and returns what that made."""

    def run(script: Path, argv: list[str]) -> tuple:
        before = set(sys.modules)
        monkeypatch.syspath_prepend(str(script.parent))
        spec = importlib.util.spec_from_file_location(f"recipe_{script.parent.name}", script)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, spec.name, module)
        spec.loader.exec_module(module)
        for name in set(sys.modules) - before:  # another recipe may have modules of the same names
            found = getattr(sys.modules[name], "__file__", None)
            if found and Path(found).parent == script.parent:
                monkeypatch.delitem(sys.modules, name)
        caught: list[tuple] = []

        def parse(*args, **kwargs):
            caught.append(parser.parse_yaml_and_args(*args, **kwargs))
            raise ParsedError

        monkeypatch.setattr(module, "parse_yaml_and_args", parse)
        with pytest.raises(ParsedError):
            module.main(argv)
        return caught[0]

    return run


def test_there_are_recipes():
    assert {path.parent.name for path in CONFIGS} >= {"image_classification", "text_classification", "causal_lm"}
    for directory in {path.parent for path in CONFIGS}:
        assert (directory / "README.md").is_file(), directory


@pytest.mark.parametrize("config", CONFIGS, ids=[f"{path.parent.name}/{path.name}" for path in CONFIGS])
def test_every_config_parses(config, arguments):
    given = arguments(config.parent / "run.py", ["--config", str(config)])
    assert all(is_dataclass(part) for part in given)
    names = {field.name for part in given for field in fields(part)}
    assert {"output_dir", "proj_dim", "top_k"} <= names


@pytest.mark.parametrize("config", CONFIGS, ids=[f"{path.parent.name}/{path.name}" for path in CONFIGS])
def test_a_key_that_is_no_argument_is_refused(config, arguments, tmp_path):
    """Recipes whose argument names no longer exist must not go unnoticed."""
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text(config.read_text() + "\nno_such_argument: 1\n")
    with pytest.raises(ValueError, match="no_such_argument"):
        arguments(config.parent / "run.py", ["--config", str(wrong)])


def test_the_configuration_of_zero_3(monkeypatch):
    """Accelerate makes of it what it sets for the processes, and the processes make their plugin of that."""
    config = RECIPES / "accelerate_configs" / "sharded" / "zero3.yaml"
    args = launch_command_parser().parse_args(["--config_file", str(config), "script.py"])
    args = _validate_launch_command(args)[0]
    args.main_process_port = 0  # any that is free
    args.deepspeed_fields_from_accelerate_config = ",".join(yaml.safe_load(config.read_text())["deepspeed_config"])
    for key, value in prepare_deepspeed_cmd_env(args)[1].items():
        monkeypatch.setenv(key, value)
    plugin = DeepSpeedPlugin()
    assert plugin.zero_stage == 3 and plugin.zero3_init_flag and plugin.zero3_save_16bit_model
    assert plugin.deepspeed_config["zero_optimization"]["stage"] == 3
    assert args.use_deepspeed and args.num_processes == 8
