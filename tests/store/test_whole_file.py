"""Reading a safetensors file at once gives what mapping it gives, or the error that damage deserves."""

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from hf_trak.store.shards import WholeFile


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "x.safetensors"
    tensors = {
        "a": torch.randn(5, 3),
        "b": torch.randn(7).half(),
        "c": torch.randn(2, 2, 3).bfloat16(),
        "empty": torch.zeros(0, 4),
    }
    save_file(tensors, path, metadata={"odd": "x" * 3})
    return path


def test_equals_safe_open(path):
    whole = WholeFile(path)
    with safe_open(path, "pt") as mapped:
        assert sorted(whole.keys()) == sorted(mapped.keys())
        assert whole.metadata() == mapped.metadata()
        for name in mapped.keys():  # noqa: SIM118
            assert torch.equal(whole.get_tensor(name), mapped.get_tensor(name))
            assert whole.get_tensor(name).dtype == mapped.get_tensor(name).dtype
            assert list(whole.get_slice(name).get_shape()) == list(mapped.get_slice(name).get_shape())
            assert whole.get_slice(name).get_dtype() == mapped.get_slice(name).get_dtype()


def test_a_header_of_any_length_is_read(tmp_path):
    """Writers other than safetensors' own need not pad the header, which leaves tensors unaligned."""
    values = torch.arange(6, dtype=torch.float32)
    entry = {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}
    for padding in range(8):
        text = json.dumps({"a": entry}).encode() + b" " * padding
        path = tmp_path / f"{padding}.safetensors"
        path.write_bytes(len(text).to_bytes(8, "little") + text + values.numpy().tobytes())
        assert torch.equal(WholeFile(path).get_tensor("a"), values.view(2, 3))


def test_a_file_cut_off_anywhere_is_refused(path):
    content = path.read_bytes()
    for length in range(0, len(content)):
        path.write_bytes(content[:length])
        with pytest.raises(SafetensorError):
            whole = WholeFile(path)
            for name in ("a", "b", "c"):
                whole.get_tensor(name)


@pytest.mark.parametrize("other", ["a", "c"])
def test_a_file_that_changes_meanwhile_is_refused(path, monkeypatch, other):
    def opened(*given, **options):
        found = safe_open(*given, **options)
        save_file({other: torch.zeros(2)}, path)
        return found

    monkeypatch.setattr("hf_trak.store.shards.safe_open", opened)
    with pytest.raises(SafetensorError, match="changed while it was read"):
        WholeFile(path)


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(
    entry=st.dictionaries(
        st.sampled_from(["dtype", "shape", "data_offsets", "other"]),
        st.one_of(
            st.sampled_from(["F32", "F16", "I64", ""]),
            st.lists(st.one_of(st.integers(-5, 2**70), st.text(max_size=2), st.floats()), max_size=3),
            st.none(),
            st.integers(),
        ),
    )
)
def test_no_header_leads_out_of_the_file(tmp_path_factory, entry):
    path = tmp_path_factory.getbasetemp() / "hostile.safetensors"
    text = json.dumps({"a": entry}).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"\0" * 24)
    try:
        tensor = WholeFile(path).get_tensor("a")
    except SafetensorError:
        return
    assert tensor.numel() * tensor.element_size() <= 24


@pytest.mark.parametrize(
    "content", [b"", b"\0" * 8, b"\xff" * 64, (2).to_bytes(8, "little") + b"[]", b"\2" + b"\0" * 7]
)
def test_other_files_are_refused(tmp_path, content):
    path = tmp_path / "x"
    path.write_bytes(content)
    with pytest.raises(SafetensorError):
        WholeFile(path)
