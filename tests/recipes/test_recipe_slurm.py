"""The job array recipe runs, and its batch scripts and launcher configs say what their programs understand."""

import importlib.util
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from types import ModuleType

import pytest
from accelerate.commands.config.config_args import load_config_from_file
from datasets import load_from_disk

RECIPES = Path(__file__).parents[2] / "recipes"
SCRIPTS = sorted((RECIPES / "slurm").glob("*.sbatch"))


@pytest.fixture(scope="module")
def recipe() -> ModuleType:
    spec = importlib.util.spec_from_file_location("slurm_recipe", RECIPES / "slurm" / "run.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_parts_and_checkpoints_in_any_order_then_scores(recipe: ModuleType, tmp_path: Path) -> None:
    common = ["--output_dir", str(tmp_path), "--checkpoints", "2", "--proj_dim", "64"]
    recipe.main(["train", *common, "--epochs", "1"])
    for checkpoint, part in ((1, "1/2"), (0, "0/2"), (1, "0/2"), (0, "1/2")):
        recipe.main(["featurize", *common, "--checkpoint", str(checkpoint), "--part", part])
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.safetensors")}
    assert len(before) == 2 * (1 + 15 + 1)  # weights, shards, Gram matrices
    recipe.main(["featurize", *common])
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.safetensors")} == before
    recipe.main(["score", *common])
    scored = load_from_disk(str(tmp_path / "scored"))
    assert len(scored) == 297 and len(scored[0]["trak_indices"]) == 10


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_batch_scripts(recipe: ModuleType, path: Path) -> None:
    """Valid shell, options of sbatch by their names, and arguments that the recipe takes."""
    text = path.read_text()
    if bash := shutil.which("bash"):
        subprocess.run([bash, "-n", str(path)], check=True)
    options = dict(re.findall(r"^#SBATCH --([a-z-]+)(?:=(\S+))?$", text, re.MULTILINE))
    assert len(options) == text.count("#SBATCH") and {"job-name", "nodes", "time", "requeue"} <= set(options)
    command = text.replace("\\\n", " ").split("recipes/slurm/run.py", 1)[1]
    command = re.sub(r"\$\(\([^)]*\)\)", "1", command).replace("$PARTS", "4")
    args = recipe.parse_arguments(shlex.split(command))
    assert args.step == "featurize" and args.part[0] < args.part[1]


def test_every_job_of_the_array_has_its_own_work() -> None:
    text = (RECIPES / "slurm" / "checkpoints.sbatch").read_text()
    first, last = map(int, re.search(r"--array=(\d+)-(\d+)", text).groups())  # type: ignore[union-attr]
    parts = int(re.search(r"^PARTS=(\d+)$", text, re.MULTILINE)[1])  # type: ignore[index]
    work = {(task // parts, task % parts) for task in range(first, last + 1)}
    assert work == {(checkpoint, part) for checkpoint in range(3) for part in range(parts)}


@pytest.mark.parametrize("path", sorted((RECIPES / "accelerate_configs").glob("*.yaml")), ids=lambda path: path.name)
def test_launcher_configs(path: Path) -> None:
    config = load_config_from_file(str(path))
    assert config.num_processes >= config.num_machines >= 1
    several = "FSDP" if path.stem == "fsdp2" else "MULTI_GPU"
    assert config.distributed_type == ("NO" if config.num_processes == 1 else several)
    assert config.mixed_precision == "no"  # gradients are taken as the model is
