"""Damaged or unusual files of model repos and datasets: every refusal names the file and its content."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from hub_server import Hub, client, hub
from safetensors.torch import save_file
from test_hostile_repos import edit, marker, model, modules

from hf_trak.cli.named_models import load_model
from hf_trak.cli.preparation import _chat_tokens, _converted
from hf_trak.cli.stored_rows import load_rows
from hf_trak.errors import RefusedIndexError
from hf_trak.hub.models import load_model as load_index_model
from hf_trak.hub.safe_loading import load_tokenizer

__all__ = ["client", "hub", "marker", "model", "modules"]  # fixtures

DAMAGE = {
    "nothing": b"", "half": b'{"a": ', "a list": b"[]", "a number": b"5", "null": b"null", "deep": b'{"a":' * 100_000,
    "deep lists": b'{"a": ' + b"[" * 500 + b"]" * 500 + b"}", "no text": b"\xff\xfe\x00", "NaN": b'{"a": NaN}',
    "endless digits": b'{"a": ' + b"9" * 10_000 + b"}", "huge": b'{"a": "' + b"x" * (9 << 20) + b'"}',
    "empty lists": b'{"a": [' + b"[]," * 1_000_000 + b"1]}",
}  # fmt: skip


@pytest.mark.parametrize("case", DAMAGE)
@pytest.mark.parametrize("file", ["config.json", "adapter_config.json", "tokenizer_config.json"])
def test_damaged_configs_are_named(model: Path, case: str, file: str) -> None:
    (model / file).write_bytes(DAMAGE[case])
    with pytest.raises(ValueError, match=rf"{file}: it (is|has|holds)"):
        (load_tokenizer if file.startswith("tokenizer") else load_model)(str(model), "main", *(
            () if file.startswith("tokenizer") else ("text_classification",)
        ))  # fmt: skip


@pytest.mark.parametrize(
    "content", [{"auto_map": 5}, {"auto_map": [1]}, {"tokenizer_class": ["x"]}, {"init_inputs": 7}]
)
def test_odd_values_in_a_tokenizer_are_errors_in_words(model: Path, content: dict[str, Any]) -> None:
    edit(model / "tokenizer_config.json", **content)
    try:
        load_tokenizer(str(model), "main")
    except ValueError as error:
        assert str(model) in str(error)


@pytest.mark.parametrize("named", [None, [], "BertModel", ["Trainer", "pipeline", 5], {"a": 1}, ["__import__"]])
def test_classes_that_are_no_models_are_named(model: Path, named: Any) -> None:
    edit(model / "config.json", architectures=named)
    with pytest.raises(ValueError, match=r"names the classes|cannot be loaded|architectures"):
        load_model(str(model), "main", None)


@pytest.mark.parametrize(
    "content",
    [b"[]", b"{", b'{"weight_map": []}', b'{"weight_map": {"a": 5}}', b'{"weight_map": {"a": "../x.safetensors"}}'],
)
def test_damaged_weight_indexes_are_named(hub: Hub, client: Path, content: bytes, tmp_path: Path) -> None:
    save_file({"a": torch.ones(1)}, tmp_path / "model.safetensors")
    weights = (tmp_path / "model.safetensors").read_bytes()
    config = json.dumps({"model_type": "bert"}).encode()
    files = {"config.json": config, "model.safetensors": weights, "model.safetensors.index.json": content}
    hub.put("model", "me/model", files)
    with pytest.raises(RefusedIndexError, match=r"model\.safetensors\.index\.json of the model repo 'me/model'"):
        load_index_model("me/model", None, "BertModel", None)


ROWS = {
    "nothing.jsonl": b"", "blank.jsonl": b"\n\n", "half.jsonl": b'{"a": 1}\n{"a":', "deep.jsonl": b"[" * 100_000,
    "empty.jsonl": b"{}\n", "nothing.json": b"", "list.json": b"[]", "nothing.csv": b"", "header.csv": b"a,b\n",
    "nothing.txt": b"", "latin.txt": b"\xff\xfe", "nothing.parquet": b"", "bad.parquet": b"PAR1xxxxPAR1",
    "bad.arrow": b"ARROW1xxxxxx",
}  # fmt: skip


@pytest.mark.parametrize("name", ROWS)
def test_files_without_rows_are_named(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(ROWS[name])
    with pytest.raises(ValueError, match=rf"No rows can be read from '.*{name}'"):
        load_rows(str(tmp_path / name), None, None, ("train",), None)


SAVED = [b"[]", b"{", b"5", b"[" * 100_000, b'{"features": 5}', b'{"_data_files": 5}']


@pytest.mark.parametrize("file", ["state.json", "dataset_info.json"])
@pytest.mark.parametrize("content", SAVED, ids=range(len(SAVED)))
def test_damaged_saved_datasets_are_named(tmp_path: Path, file: str, content: bytes) -> None:
    Dataset.from_dict({"a": [1]}).save_to_disk(tmp_path / "rows")
    (tmp_path / "rows" / file).write_bytes(content)
    if (file, content) == ("dataset_info.json", b'{"_data_files": 5}'):
        assert len(load_rows(str(tmp_path / "rows"), None, None, ("train",), None)) == 1  # a key that nobody reads
        return
    with pytest.raises(ValueError, match=f"No rows can be read from '{tmp_path / 'rows'}'"):
        load_rows(str(tmp_path / "rows"), None, None, ("train",), None)


def test_cards_of_datasets_are_looked_through(tmp_path: Path) -> None:
    """`datasets` loads the YAML of a card: 400 bytes could take all memory."""
    (tmp_path / "a.csv").write_text("a\n1\n")
    lines = ["---", "a: &a [x,x,x,x,x,x,x,x,x]"]
    lines += [f"{chr(98 + i)}: &{chr(98 + i)} [{','.join([f'*{chr(97 + i)}'] * 9)}]" for i in range(9)]
    (tmp_path / "README.md").write_text("\n".join([*lines, "---", ""]))
    with pytest.raises(ValueError, match=r"README\.md was refused: line 2 refers to another place"):
        load_rows(str(tmp_path), None, None, ("train",), None)
    (tmp_path / "README.md").write_text("---\nlicense: mit\n---\n# Rows\n")
    assert load_rows(str(tmp_path), None, None, ("train",), None)["a"][:] == [1]


@pytest.mark.parametrize(
    "template",
    ["{{ raise_exception('no system turns') }}", "{{ messages.__class__.__mro__ }}", "{% for", "{{ x.y.z }}"],
)
def test_a_chat_template_that_fails_is_named(model: Path, template: str) -> None:
    """The template comes with the model and runs in a sandbox, whose refusal becomes a clear error."""
    edit(model / "tokenizer_config.json", chat_template=template)
    tokenizer = load_tokenizer(str(model), "main")
    with pytest.raises(ValueError, match="The chat template of the tokenizer fails on the messages"):
        _chat_tokens([{"role": "user", "content": "good"}, {"role": "assistant", "content": "bad"}], tokenizer, None)


def test_rows_that_are_no_images_and_datasets_without_rows_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="A row has None in the column 'photo'"):
        _converted(None, "photo", "RGB")
    Dataset.from_dict({"a": [1]}).select([]).save_to_disk(tmp_path / "rows")
    with pytest.raises(ValueError, match=r"No rows can be read|has no rows"):
        load_rows(str(tmp_path / "rows"), None, None, ("train",), None)
