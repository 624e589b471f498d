"""The recipe of large language models: one tiny run in one and in two processes, its scripts, and launcher configs."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils import FullyShardedDataParallelPlugin, ParallelismConfig
from accelerate.utils.launch import prepare_multi_gpu_env
from datasets import load_from_disk
from recipe_runs import CPU, ROOT, imported, run_script
from safetensors.torch import load_file

RECIPE = ROOT / "recipes" / "large_lm"
CONFIGS = ROOT / "recipes" / "accelerate_configs"
SMALL = ["--size", "tiny", "--rows", "12", "--tokens", "16", "--shard_size", "4", "--proj_dim", "64", *CPU]
SMALL += ["--feature_dtype", "float32"]


@pytest.fixture(scope="module")
def recipe():
    with imported(RECIPE) as module:
        yield module


def shards(out: Path) -> dict[str, Path]:
    return {path.name: path for path in sorted((out / "trak").glob("checkpoint-0/train-*.safetensors"))}


def parse(recipe, *argv: str):
    return recipe.parse_yaml_and_args((recipe.RecipeArguments, recipe.DataArguments, recipe.TrakConfig), list(argv))


@pytest.mark.slow
def test_a_tiny_run_on_text_and_the_same_command_again(recipe, tmp_path):
    text = tmp_path / "corpus.txt"
    text.write_text("To be, or not to be, that is the question. " * 6)
    out = tmp_path / "out"
    arguments = [*SMALL, "--output_dir", str(out), "--text", str(text), "--targets", "1", "--checkpointing"]
    recipe.main(arguments)
    before = {name: path.stat().st_mtime_ns for name, path in shards(out).items()}
    assert len(before) == 4  # 258 bytes are 16 rows of 16 tokens: 15 training rows
    recipe.main(arguments)
    assert {name: path.stat().st_mtime_ns for name, path in shards(out).items()} == before
    scored, train = load_from_disk(str(out / "scored")), load_from_disk(str(out / "train"))
    assert len(scored) == 1 and len(train) == 15 and bytes(train[0]["input_ids"]) == b"To be, or not to"
    summary = json.loads((out / "summary.json").read_text())
    assert summary["parameters"] == 26784 and summary["targets"][0]["rows"] == scored[0]["trak_indices"]


def test_sizes_are_those_of_the_models(recipe):
    from llama import LlamaForCausalLM, config_of

    for size, count in (("1b", 1_235_814_400), ("8b", 8_030_261_248)):
        with torch.device("meta"):
            model = LlamaForCausalLM(config_of(size, 64))
        assert sum(parameter.numel() for parameter in model.parameters()) == count
        assert f"| `{size}` | {count:,} |" in (RECIPE / "README.md").read_text()


def test_a_weight_depends_on_its_place_alone(recipe, monkeypatch):
    import llama

    model = torch.nn.Linear(300, 400)  # more than one run of elements
    llama.draw_weights(model)
    whole = model.weight.detach().clone().flatten()
    part = torch.zeros(50_000)
    monkeypatch.setattr(llama, "flat_spans", lambda parameter: [(40_000, part)] if parameter.ndim == 2 else [])
    llama.draw_weights(model)
    assert torch.equal(part, whole[40_000:90_000])


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--size", "9b"], "`size` is '9b'"),
        (["--tokens", "1"], "`tokens` is 1"),
        (["--tp", "3"], "`tp` is 3, with 1 processes"),
        (["--tp", "2", "--replicas", "2"], "`tp` is 2 and `replicas` is 2"),
        (["--text", "short.txt"], "has 5 tokens, for 0 rows"),
        (["--text", "short.txt", "--tokens", "2", "--tokenizer", "far"], "has the token 300"),
    ],
)
def test_wrong_arguments(recipe, argv, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("short.txt").write_text("words")
    monkeypatch.setattr(
        recipe.AutoTokenizer, "from_pretrained", lambda name: lambda text: {"input_ids": [300] * 8}, raising=True
    )
    with pytest.raises(ValueError, match=message):
        recipe.main([*CPU, *argv])


def check_two_processes(alone: Path, two: Path, *division: str) -> None:
    """Run the recipe in one process and in two, and compare features."""
    run_script(RECIPE, alone, *SMALL)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    command = [*launch, str(RECIPE / "run.py"), *SMALL, *division, "--output_dir", str(two)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    subprocess.run(command, env=environment, check=True, capture_output=True, timeout=600)
    assert json.loads((two / "summary.json").read_text())["processes"] == 2
    for name, path in shards(alone).items():
        expected, found = load_file(path)["grads"], load_file(shards(two)[name])["grads"]
        # float32 rounding of layers that are gathered instead of whole
        assert float(((found - expected).norm(dim=1) / expected.norm(dim=1)).max()) < 1e-5


@pytest.mark.slow
def test_two_processes_with_slices_of_matrices_give_the_features_of_one(tmp_path):
    """transformers divides the model that the recipe writes, or that somebody else has written."""
    check_two_processes(tmp_path / "alone", tmp_path / "two", "--tp", "2", "--checkpointing")
    saved = tmp_path / "two" / "model-tiny-float32"
    check_two_processes(tmp_path / "alone", tmp_path / "given", "--tp", "2", "--checkpoint", str(saved))
    assert not list((tmp_path / "given").glob("model*"))


def test_a_model_that_was_written_in_part_is_written_anew(recipe, tmp_path, monkeypatch):
    import llama

    directory = tmp_path / "model-tiny-float32"
    config, processes = llama.config_of("tiny", 16), recipe.Processes(True)
    drawn, loaded = llama.draw_weights, []
    monkeypatch.setattr(llama, "draw_weights", lambda model: 1 / 0)
    make = partial(llama.tensor_parallel_model, config, torch.float32, processes, 1, directory)
    with pytest.raises(Exception, match="division by zero"):
        make()
    assert not directory.exists()
    monkeypatch.setattr(llama, "draw_weights", drawn)
    monkeypatch.setattr(
        llama.LlamaForCausalLM, "from_pretrained", lambda path, **options: loaded.append(path) or torch.nn.Identity()
    )
    make()
    assert loaded == [directory] and load_file(directory / "model.safetensors")


@pytest.mark.slow
def test_two_processes_give_the_features_of_one_and_one_goes_on(tmp_path):
    two = tmp_path / "two"
    check_two_processes(tmp_path / "alone", two)
    removed = list(shards(two).values())[1]
    removed.unlink()
    run_script(
        RECIPE, two, *SMALL
    )  # one process with the whole model: fingerprints agree, and the shard is made again
    assert removed.exists()


@pytest.mark.parametrize("path", sorted(RECIPE.glob("*.sbatch")), ids=lambda path: path.name)
def test_batch_scripts(recipe, path):
    """Valid shell, options of sbatch by their names, arguments that the recipe takes, a way back into the queue."""
    text = path.read_text()
    if bash := shutil.which("bash"):
        subprocess.run([bash, "-n", str(path)], check=True)
    options = dict(re.findall(r"^#SBATCH --([a-z-]+)(?:=(\S+))?$", text, re.MULTILINE))
    assert len(options) == text.count("#SBATCH") and {"nodes", "time", "requeue"} <= set(options)
    assert options["signal"] == "B:USR1@120" and "USR1\n" in text and text.rstrip().endswith('&\nwait "$!"')
    command = text.replace("\\\n", " ").split("recipes/large_lm/run.py", 1)[1].split("&")[0]
    args, *_ = parse(recipe, *shlex.split(command))
    assert args.size == "8b" and args.replicas == int(options["nodes"]) and args.output_dir == "outputs/large_lm"


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("fsdp2.yaml", (1, 1, 1)),
        ("sharded/hsdp.yaml", (2, 4, 1)),
        ("sharded/tp.yaml", (1, 4, 2)),
        ("sharded/two_nodes.yaml", (2, 8, 1)),
    ],
)
def test_launcher_configs(name, sizes, monkeypatch):
    """Accelerate makes of them what it sets for the processes, and the processes make their plugins of that."""
    args = launch_command_parser().parse_args(["--config_file", str(CONFIGS / name), "script.py"])
    args = _validate_launch_command(args)[0]
    if args.num_machines == 1:
        args.main_process_port = 0  # any that is free
    else:
        monkeypatch.setattr("accelerate.utils.launch.is_port_in_use", lambda port: False)
    for key, value in prepare_multi_gpu_env(args).items():
        monkeypatch.setenv(key, value)
    plugin, parallel = FullyShardedDataParallelPlugin(), ParallelismConfig()
    assert plugin.fsdp_version == 2 and plugin.reshard_after_forward is True
    assert (parallel.dp_replicate_size, parallel.dp_shard_size, parallel.tp_size) == sizes
    assert parallel.total_size in (1, args.num_processes)
    assert int(args.nproc_per_node) * args.num_machines == args.num_processes
