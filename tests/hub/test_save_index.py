"""An index in a local directory: the files that would be uploaded, loaded again without the training rows."""

from pathlib import Path

import numpy as np
import pytest
from hub_server import TOKEN, Hub, client, hub
from test_hub_attributor import OPTIONS, full, sentences, tiny_bert
from test_hub_attributor import one_thread as one_thread

from hf_trak import TrakAttributor, TrakConfig
from hf_trak.cli.main import main
from hf_trak.errors import HfTrakError, IncompleteStoreError, StoreError

__all__ = ["client", "hub"]  # fixtures


def attributor_in(directory: Path) -> TrakAttributor:
    args = TrakConfig(str(directory), proj_dim=32, shard_size=8, per_device_batch_size=3, **OPTIONS)
    return TrakAttributor(tiny_bert(1), args, train_dataset=sentences(0, 22))


def files_in(directory: Path) -> dict[str, bytes]:
    return {
        path.relative_to(directory).as_posix(): path.read_bytes() for path in directory.rglob("*") if path.is_file()
    }


@pytest.mark.slow
def test_the_directory_is_the_repo(hub: Hub, client: Path, tmp_path: Path) -> None:
    """Files are those of `push_to_hub`, and scores those of the run. The second call refuses the directory."""
    made = attributor_in(tmp_path / "trak").featurize()
    made.fit_curvature()
    expected = full(made, method="index")
    saved = tmp_path / "deep" / "index"
    made.save_pretrained(saved, lds=0.25)
    made.push_to_hub("tester/index", token=TOKEN, lds=0.25, private=False)
    published, found = dict(hub.dataset("tester/index")), files_in(saved)
    del published[".gitattributes"]
    published["README.md"] = published["README.md"].replace(b"tester/index", b"index")
    assert found == published and any(name.startswith("curvature/") for name in found)
    assert str(tmp_path).encode() not in b"".join(found.values())
    loaded = TrakAttributor.from_pretrained(str(saved), tiny_bert(1), **OPTIONS)
    assert np.array_equal(full(loaded, method="index"), expected) and loaded.args.per_device_batch_size == 3
    assert files_in(saved) == found
    with pytest.raises(ValueError, match=r"index exists and is not an empty directory"):
        made.save_pretrained(saved)
    assert files_in(saved) == found
    with pytest.raises(ValueError, match="is published already"):
        loaded.save_pretrained(tmp_path / "again")
    (tmp_path / "empty").mkdir()
    made.save_pretrained(tmp_path / "empty", curvature=False)
    assert "curvature/0/curvature.json" not in files_in(tmp_path / "empty")


def test_nothing_is_left_of_an_index_that_cannot_be_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = attributor_in(tmp_path / "trak")
    with pytest.raises(IncompleteStoreError):
        made.save_pretrained(tmp_path / "index")
    made.featurize()
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ValueError, match="exists and is not an empty directory"):
        made.save_pretrained(tmp_path / "file")

    def full_disk(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as broken, pytest.raises(StoreError, match="No space left"):
        broken.setattr("hf_trak.hub.push.shutil.copyfile", full_disk)
        made.save_pretrained(tmp_path / "index")
    shard = tmp_path / "trak/checkpoint-0/train-00001-of-00003.safetensors"
    shard.write_bytes(shard.read_bytes()[:-4])
    with pytest.raises(HfTrakError, match="train-00001"):
        made.save_pretrained(tmp_path / "index")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "trak"]


def test_a_saved_index_is_complete(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`inspect` takes a small index, whose solver is made where it is loaded, for complete if no shard is missing."""
    attributor_in(tmp_path / "trak").featurize().save_pretrained(tmp_path / "index")
    assert main(["inspect", str(tmp_path / "index")]) == 0
    shown = capsys.readouterr().out
    assert "checkpoint 0: complete\n" in shown and "hf-trak featurize" not in shown
    (tmp_path / "index/checkpoint-0/train-00001-of-00003.safetensors").unlink()
    main(["inspect", str(tmp_path / "index")])
    assert "checkpoint 0: 1 of 3 shards missing\n" in capsys.readouterr().out
