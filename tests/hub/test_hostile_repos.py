"""Malicious model repos and datasets: their code is not run, the user is not asked whether to run it, and the refusal
names the file and the key."""

import ast
import json
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from hub_server import TOKEN, Hub, client, environment, hub
from peft import LoraConfig, PeftType, get_peft_model
from test_hub_hostile import Bomb
from transformers import AutoModelForCausalLM, AutoTokenizer, BertConfig, BertForSequenceClassification, BertTokenizer

from hf_trak.cli.main import main
from hf_trak.cli.named_models import load_model
from hf_trak.cli.stored_rows import load_rows
from hf_trak.hub import safe_loading
from hf_trak.hub.models import load_model as load_index_model
from hf_trak.hub.safe_loading import (
    ADAPTERS,
    check_repo_config,
    load_image_processor,
    load_processor,
    load_tokenizer,
)

__all__ = ["client", "hub"]  # fixtures

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "good", "bad", "film"]
ARGUMENTS = {
    "vocab_size": len(WORDS), "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2,
    "intermediate_size": 8, "max_position_embeddings": 16, "num_labels": 2,
}  # fmt: skip


def mine(marker: Path) -> str:
    """Return Python code that creates a file when it is run, under any name that it is imported by."""
    return f"""
from pathlib import Path
Path({str(marker)!r}).write_text("run")
import transformers
class Config(transformers.BertConfig): pass
class Model(transformers.BertForSequenceClassification): pass
class Tokenizer(transformers.BertTokenizer): pass
class Images(transformers.ViTImageProcessor): pass
class Processor(transformers.CLIPProcessor): pass
def generate(*args, **kwargs): pass
"""


@pytest.fixture(autouse=True)
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the code of repos that transformers runs in a directory of the test."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))


@pytest.fixture
def marker(tmp_path: Path) -> Path:
    return tmp_path / "executed"


@pytest.fixture
def model(tmp_path: Path, marker: Path) -> Path:
    """Save a valid model with its tokenizer, and code beside them."""
    directory = tmp_path / "model"
    BertForSequenceClassification(BertConfig(**ARGUMENTS)).save_pretrained(directory)
    (tmp_path / "vocab.txt").write_text("\n".join(WORDS))
    BertTokenizer(vocab=str(tmp_path / "vocab.txt"), model_max_length=16).save_pretrained(directory)
    (directory / "evil.py").write_text(mine(marker))
    return directory


def edit(path: Path, **changes: Any) -> None:
    content = json.loads(path.read_text()) if path.is_file() else {}
    path.write_text(json.dumps({**content, **changes}))


@pytest.fixture
def says_yes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Simulate a user who agrees to everything; the list collects the questions."""
    asked: list[str] = []

    def answer(question: str = "") -> str:
        asked.append(question)
        return "y"

    monkeypatch.setattr("builtins.input", answer)
    return asked


# -- code in the repo ------------------------------------------------------------------------------------------------


def test_the_trap_works(model: Path, marker: Path) -> None:
    """If code of a repo is trusted, it creates the file that the other tests look for."""
    edit(model / "config.json", auto_map={"AutoConfig": "evil.Config"}, model_type="unheard-of")
    from transformers import AutoConfig

    AutoConfig.from_pretrained(model, trust_remote_code=True)
    assert marker.exists()


@pytest.mark.parametrize("task", ["text_classification", None])
@pytest.mark.parametrize("model_type", ["unheard-of", "bert"])
def test_code_of_a_model_is_not_run(
    model: Path, marker: Path, says_yes: list[str], task: str | None, model_type: str
) -> None:
    """Models that transformers knows are built by transformers; all others are refused."""
    auto_map = {"AutoConfig": "evil.Config", "AutoModelForSequenceClassification": "evil.Model"}
    edit(model / "config.json", auto_map=auto_map, model_type=model_type)
    (model / "custom_generate").mkdir()
    (model / "custom_generate" / "generate.py").write_text(mine(marker))
    if model_type == "bert":
        assert type(load_model(str(model), "main", task)).__module__.startswith("transformers.models.bert")
    else:
        with pytest.raises(ValueError, match=r"runs no code that a repo brings"):
            load_model(str(model), "main", task)
    assert not marker.exists() and not says_yes


@pytest.mark.slow
def test_the_command_line_runs_no_code_whatever_stands_on_stdin(
    model: Path, marker: Path, tmp_path: Path, hub: Hub, client: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`hf-trak attribute --index` with `y` on stdin, for a tokenizer that is made by code."""
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    rows = Dataset.from_dict({"sentence": ["good film", "bad film"] * 4, "label": [1, 0] * 4})
    rows.save_to_disk(tmp_path / "rows")
    work = ["--use_cpu", "--output_dir"]
    training = ["--model", str(model), "--train_dataset", str(tmp_path / "rows"), "--proj_dim", "8"]
    assert main(["featurize", *training, *work, str(tmp_path / "trak")]) == 0
    assert (
        main(["push", str(tmp_path / "trak"), "--repo_id", "me/index", "--model_name", "me/model", "--no_private"])
        == 0
    )
    edit(model / "tokenizer_config.json", auto_map={"AutoTokenizer": ["evil.Tokenizer", None]}, tokenizer_class="Mine")
    edit(model / "config.json", model_type="vit")  # for which transformers has no tokenizer
    hub.put("model", "me/model", {path.name: path.read_bytes() for path in model.iterdir()})
    command = ["attribute", "--index", "me/index", "--eval_dataset", str(tmp_path / "rows"), "--top_k", "2"]
    command = [sys.executable, "-m", "hf_trak", *command, *work, str(tmp_path / "out")]
    variables = {**environment(hub, client), "HF_TOKEN": TOKEN}
    done = subprocess.run(command, env=variables, capture_output=True, text=True, input="y\n" * 20, timeout=200)
    assert not marker.exists(), done.stderr
    assert "y/N" not in done.stdout + done.stderr
    assert done.returncode == 1 and "'me/model' was refused: its tokenizer is made by Python code" in done.stderr


@pytest.mark.slow
def test_a_directory_is_not_taken_for_the_repo_of_an_index(
    model: Path, tmp_path: Path, hub: Hub, client: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """Neither the weights nor the tokenizer of the directory are used."""
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    rows = Dataset.from_dict({"sentence": ["good film", "bad film"] * 4, "label": [1, 0] * 4})
    rows.save_to_disk(tmp_path / "rows")
    work = ["--use_cpu", "--output_dir"]
    training = ["--model", str(model), "--train_dataset", str(tmp_path / "rows"), "--proj_dim", "8"]
    assert main(["featurize", *training, *work, str(tmp_path / "trak")]) == 0
    assert (
        main(["push", str(tmp_path / "trak"), "--repo_id", "me/index", "--model_name", "me/model", "--no_private"])
        == 0
    )
    hub.put("model", "me/model", {path.name: path.read_bytes() for path in model.iterdir()})
    (tmp_path / "me" / "model").mkdir(parents=True)
    command = ["attribute", "--index", "me/index", "--eval_dataset", str(tmp_path / "rows"), "--top_k", "2", *work]
    monkeypatch.chdir(tmp_path)
    assert main([*command, str(tmp_path / "out")]) == 1
    assert "'me/model', and there is a directory of that name here" in capsys.readouterr().err
    monkeypatch.chdir(tmp_path / "me")
    assert main([*command, str(tmp_path / "out")]) == 0


PROCESSING: dict[str, tuple[Callable[[str, str], Any], str, dict[str, Any]]] = {
    "tokenizer": (load_tokenizer, "tokenizer_config.json", {"auto_map": {"AutoTokenizer": ["evil.Tokenizer", None]}}),
    "image processor": (
        load_image_processor, "preprocessor_config.json", {"auto_map": {"AutoImageProcessor": "evil.Images"}}
    ),
    "processor": (load_processor, "processor_config.json", {"auto_map": {"AutoProcessor": "evil.Processor"}}),
}  # fmt: skip


@pytest.mark.parametrize("kind", PROCESSING)
def test_code_of_tokenizers_and_processors_is_not_run(
    model: Path, marker: Path, says_yes: list[str], kind: str
) -> None:
    load, file, content = PROCESSING[kind]
    (model / "config.json").write_text(json.dumps({"model_type": "unheard-of"}))
    (model / file).write_text(json.dumps({**content, "tokenizer_class": "Mine"}))
    with pytest.raises(ValueError, match=f"its {kind} is made by Python code of the repo"):
        load(str(model), "main")
    assert not marker.exists() and not says_yes


def test_the_parts_of_a_tokenizer_are_not_made_by_code_either(model: Path, marker: Path, says_yes: list[str]) -> None:
    """The tokenizer of a RAG model loads two others without `trust_remote_code`, so transformers itself would ask."""
    rag = {"model_type": "rag", "question_encoder": {"model_type": "vit"}, "generator": {"model_type": "vit"}}
    (model / "config.json").write_text(json.dumps(rag))
    (model / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "RagTokenizer"}))
    for name in ("question_encoder_tokenizer", "generator_tokenizer"):
        (model / name).mkdir()
        (model / name / "evil.py").write_text(mine(marker))
        auto_map = {"AutoTokenizer": ["evil.Tokenizer", None]}
        (model / name / "tokenizer_config.json").write_text(json.dumps({"auto_map": auto_map, "tokenizer_class": "X"}))
    with pytest.raises(ValueError, match="made by Python code"):
        load_tokenizer(str(model), "main")
    assert not marker.exists() and not says_yes


def test_the_parts_of_a_model_are_not_made_by_code_either(model: Path, marker: Path, says_yes: list[str]) -> None:
    """The decoder is of a type that transformers has no language model for, and has code of its own."""
    bert = json.loads((model / "config.json").read_text())
    vit = {"model_type": "vit", "auto_map": {"AutoModelForCausalLM": "evil.Model"}, "_name_or_path": str(model)}
    both = {"model_type": "encoder-decoder", "encoder": bert, "decoder": vit, "architectures": ["EncoderDecoderModel"]}
    (model / "config.json").write_text(json.dumps(both))
    with pytest.raises(ValueError, match="made by Python code"):
        load_model(str(model), "main", None)
    assert not marker.exists() and not says_yes


def test_transformers_asks_again_afterwards(model: Path, marker: Path, says_yes: list[str]) -> None:
    """Other uses of transformers in the same process are not affected."""
    load_tokenizer(str(model), "main")
    (model / "config.json").write_text(json.dumps({"model_type": "unheard-of"}))
    edit(model / "tokenizer_config.json", auto_map={"AutoTokenizer": ["evil.Tokenizer", None]}, tokenizer_class="Mine")
    AutoTokenizer.from_pretrained(model)
    assert says_yes and marker.exists()


def test_code_of_a_dataset_is_not_run(tmp_path: Path, marker: Path, says_yes: list[str]) -> None:
    directory = tmp_path / "rows"
    directory.mkdir()
    (directory / "rows.py").write_text(mine(marker))
    (directory / "a.csv").write_text("a\n1\n")
    with pytest.raises((ValueError, RuntimeError), match=r"rows\.py"):
        load_rows(str(directory), None, None, ("train",), None)
    assert not marker.exists() and not says_yes


# -- code elsewhere --------------------------------------------------------------------------------------------------


ELSEWHERE: dict[str, tuple[dict[str, Any], str]] = {
    "attention from a repo": ({"attn_implementation": "evil/kernel"}, "`attn_implementation` is 'evil/kernel'"),
    "attention from a known repo": ({"attn_implementation": "kernels-community/flash-attn2"}, "kernels-community"),
    "private name": ({"_attn_implementation": "evil/kernel@main:forward"}, "`_attn_implementation`"),
    "internal name": ({"_attn_implementation_internal": "evil/kernel"}, "_attn_implementation_internal"),
    "paged": ({"attn_implementation": "paged|evil/kernel"}, r"paged\|evil/kernel"),
    "not installed": ({"attn_implementation": "flash_attention_2"}, "flash_attention_2"),
    "by part": ({"attn_implementation": {"text_config": "evil/kernel"}}, "evil/kernel"),
    "of a part": ({"text_config": {"vision": [{"attn_implementation": "e/k"}]}}, r"text_config\.vision\[0\]\.attn"),
    "no text": ({"attn_implementation": 5}, "is 5"),
    "experts": ({"experts_implementation": "sonicmoe"}, "`experts_implementation` is 'sonicmoe'"),
    "quantization": ({"quantization_config": {"quant_method": "mxfp4"}}, "quant_method` is 'mxfp4'"),
    "quantization without a method": ({"quantization_config": {}}, "quant_method` is None"),
    "quantization that is a list": ({"quantization_config": [1]}, "a list of 1"),
    "backbone of a repo": ({"backbone": "evil/model", "use_timm_backbone": True}, "`backbone` is 'evil/model'"),
    "backbone of timm's hub": ({"architecture": "hf-hub:evil/model"}, "`architecture` is 'hf-hub:evil/model'"),
    "backbone of a directory": ({"architecture": "local-dir:/tmp"}, "local-dir"),
    "arguments of timm": ({"model_args": {"checkpoint_path": "/etc/passwd"}}, r"\['checkpoint_path'\]"),
    "weights elsewhere": ({"transformers_weights": "../../other.safetensors"}, "transformers_weights"),
    "config elsewhere": ({"configuration_files": ["config.../../../x.json"]}, "configuration_files"),
    "changed classes": ({"fusion_config": {"patch_embeddings": True}}, "fusion_config"),
}  # fmt: skip


@pytest.mark.parametrize("case", ELSEWHERE)
def test_a_config_that_leads_elsewhere_is_refused(model: Path, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command line and an index both refuse it before anything is built, and no kernel is requested."""
    changes, reason = ELSEWHERE[case]
    edit(model / "config.json", **changes)

    def fetched(*args: Any, **kwargs: Any) -> None:
        raise AssertionError(f"a kernel was asked for: {args}")

    monkeypatch.setattr("transformers.integrations.hub_kernels.get_kernel", fetched)
    monkeypatch.setattr("transformers.modeling_utils.is_kernels_available", lambda: True)
    with pytest.raises(ValueError, match=rf"config\.json: .*{reason}"):
        load_model(str(model), "main", "text_classification")
    with pytest.raises(ValueError, match=reason):
        load_index_model(str(model), None, "BertForSequenceClassification", None)
    with pytest.raises(ValueError, match=reason):
        load_tokenizer(str(model), "main")


def test_transformers_would_have_fetched_the_kernel(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the refusal, transformers requests the kernel."""
    edit(model / "config.json", attn_implementation="evil/kernel")
    asked: list[str] = []

    def fetched(name: str, **kwargs: Any) -> None:
        asked.append(name)
        raise ValueError("no such kernel")

    monkeypatch.setattr("transformers.integrations.hub_kernels.get_kernel", fetched)
    monkeypatch.setattr("transformers.integrations.hub_kernels.is_kernels_available", lambda: True)
    with pytest.raises(ValueError, match="no such kernel"):
        BertForSequenceClassification.from_pretrained(model)
    assert asked == ["evil/kernel"]


def test_usual_configs_pass() -> None:
    for content in (
        {"attn_implementation": "sdpa", "_attn_implementation_autoset": True, "experts_implementation": None},
        {"attn_implementation": {"": "eager", "text_config": "sdpa"}, "auto_map": {"AutoModel": "modeling.M"}},
        {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}},
        {"quantization_config": {"load_in_8bit": True}},
        {"quantization_config": None, "backbone": "resnet50", "backbone_kwargs": {"in_chans": 3}},
        {"architecture": "vit_base_patch16_224.augreg", "model_args": {"depth": 3}},
        {"id2label": {"0": "a/b", "1": "c:d"}, "label2id": {"a/b": 0, "c:d": 1}},
    ):
        check_repo_config(content)


def test_a_local_model_is_loaded_as_ever(model: Path) -> None:
    loaded = load_model(str(model), "main", "text_classification")
    plain = BertForSequenceClassification.from_pretrained(model)
    assert all(torch.equal(a, b) for a, b in zip(loaded.parameters(), plain.parameters(), strict=True))
    assert load_tokenizer(str(model), "main")("good film")["input_ids"] == [2, 5, 7, 3]


def test_every_file_is_of_the_commit_that_was_looked_at(
    hub: Hub, client: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A repo that changes between check and loading is loaded as it was checked."""
    good = {path.name: path.read_bytes() for path in model.iterdir()}
    hub.put("model", "me/model", good)
    look = safe_loading.check_repo_config

    def meanwhile(content: Any) -> None:
        look(content)
        edit(model / "config.json", attn_implementation="evil/kernel")
        hub.put("model", "me/model", {path.name: path.read_bytes() for path in model.iterdir()})

    monkeypatch.setattr(safe_loading, "check_repo_config", meanwhile)
    assert load_model("me/model", "main", "text_classification").config._attn_implementation == "sdpa"


# -- adapters --------------------------------------------------------------------------------------------------------


@pytest.fixture
def adapter(model: Path, tmp_path: Path) -> Path:
    base = BertForSequenceClassification.from_pretrained(model)
    lora = get_peft_model(base, LoraConfig(r=2, target_modules=["query"], task_type="SEQ_CLS"))
    lora.save_pretrained(tmp_path / "adapter")
    edit(tmp_path / "adapter" / "adapter_config.json", base_model_name_or_path=str(model))
    return tmp_path / "adapter"


def test_a_good_adapter_is_loaded(adapter: Path) -> None:
    loaded = load_model(str(adapter), "main", "text_classification")
    assert "default" in loaded.peft_config
    assert {PeftType[name] for name in ADAPTERS if name in PeftType.__members__} >= {PeftType.LORA, PeftType.IA3}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"peft_type": "SHADOW", "shadow_model": "evil/model"}, "`peft_type` is 'SHADOW'"),
        ({"peft_type": "XLORA", "adapters": {"a": "/etc"}}, "`peft_type` is 'XLORA'"),
        ({"peft_type": "PROMPT_TUNING", "tokenizer_kwargs": {"trust_remote_code": True}}, "PROMPT_TUNING"),
        ({"peft_type": None}, "`peft_type` is None"),
        ({"megatron_config": {"a": 1}, "megatron_core": "evil"}, "megatron_config"),
        ({"base_model_name_or_path": None}, "base_model_name_or_path"),
        ({"base_model_name_or_path": 5}, "base_model_name_or_path"),
        ({"revision": ["x"]}, "revision"),
    ],
)
def test_an_adapter_that_needs_more_is_refused(adapter: Path, changes: dict[str, Any], reason: str) -> None:
    edit(adapter / "adapter_config.json", **changes)
    with pytest.raises(ValueError, match=rf"adapter_config\.json: .*{reason}"):
        load_model(str(adapter), "main", "text_classification")


def test_an_adapter_that_is_its_own_base_is_refused(adapter: Path) -> None:
    edit(adapter / "adapter_config.json", base_model_name_or_path=str(adapter))
    (adapter / "config.json").write_text(json.dumps({"model_type": "bert"}))
    with pytest.raises(ValueError, match="so it is an adapter"):
        load_model(str(adapter), "main", "text_classification")


def test_the_base_of_an_adapter_runs_no_code(adapter: Path, model: Path, marker: Path, says_yes: list[str]) -> None:
    edit(model / "config.json", auto_map={"AutoConfig": "evil.Config"}, model_type="unheard-of")
    with pytest.raises(ValueError, match="runs no code"):
        load_model(str(adapter), "main", "text_classification")
    assert not marker.exists() and not says_yes


def test_an_index_names_no_adapters(adapter: Path, model: Path) -> None:
    (model / "adapter_config.json").write_bytes((adapter / "adapter_config.json").read_bytes())
    with pytest.raises(ValueError, match="so it is an adapter"):
        load_index_model(str(model), None, "BertForSequenceClassification", None)


# -- weights ---------------------------------------------------------------------------------------------------------


WEIGHTS = ("pytorch_model.bin", "adapter_model.bin")


@pytest.mark.parametrize("name", WEIGHTS)
@pytest.mark.parametrize("kind", ["pickle", "torch"])
def test_pickled_weights_run_nothing(
    model: Path, adapter: Path, tmp_path: Path, marker: Path, name: str, kind: str
) -> None:
    directory = adapter if name.startswith("adapter") else model
    for path in directory.glob("*.safetensors"):
        path.unlink()
    if kind == "torch":
        torch.save({"a": Bomb(marker)}, directory / name)
    else:
        (directory / name).write_bytes(pickle.dumps(Bomb(marker)))
    with pytest.raises(ValueError, match=r"The weights of .* are damaged, or hold something else"):
        load_model(str(directory), "main", "text_classification")
    assert not marker.exists()


@pytest.mark.parametrize("name", ["model.safetensors", "adapter_model.safetensors"])
@pytest.mark.parametrize("data", [b"", b"x" * 100, (2**60).to_bytes(8, "little") + b"{}"], ids=range(3))
def test_damaged_weights_are_named(model: Path, adapter: Path, name: str, data: bytes) -> None:
    directory = adapter if name.startswith("adapter") else model
    (directory / name).write_bytes(data)
    with pytest.raises(ValueError, match=f"The weights of '{directory}' are damaged"):
        load_model(str(directory), "main", "text_classification")


# -- the one place ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_no_module_loads_by_name_but_one() -> None:
    """Only `safe_loading` loads models, tokenizers and rows by name.

    Reports and retrainings read back rows that the library has written itself, and checkpoints are loaded into an
    existing model.
    """
    root = Path(safe_loading.__file__).parents[1]
    own_rows = ("report/", "evaluation/")
    found = []
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root).as_posix()
        tree = ast.parse(path.read_text())
        if name == "hub/safe_loading.py":
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module == "datasets":
                loaders = {alias.name for alias in node.names} & {"load_dataset", "load_from_disk"}
                if loaders and not (loaders == {"load_from_disk"} and name.startswith(own_rows)):
                    found.append(f"{name}:{node.lineno}: {loaders}")
            elif isinstance(node, ast.Attribute) and node.attr in ("from_pretrained", "load_dataset"):
                owner = ast.unparse(node.value)
                if owner not in ("TrakAttributor", "safe_loading") and (name, owner) != (
                    "weights/checkpoints.py",
                    "type(model)",
                ):
                    found.append(f"{name}:{node.lineno}: {owner}.{node.attr}")
    assert not found


def test_auto_classes_are_told_not_to_trust(model: Path) -> None:
    """An auto class without `trust_remote_code` would ask the user."""
    given: dict[str, Any] = {}

    class Spy(AutoModelForCausalLM):
        @classmethod
        def from_pretrained(cls, name: str, **kwargs: Any) -> None:
            given.update(kwargs)

    safe_loading.load_model(str(model), "main", Spy)
    assert given["trust_remote_code"] is False and given["weights_only"] is True
