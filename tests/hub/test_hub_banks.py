"""Banks on the Hub: pushed and loaded over HTTP, updated, interrupted, and those of malicious publishers."""

import hashlib
import json
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import scipy.stats
import torch
import xxhash
from datasets import Dataset
from hub_server import TOKEN, Fault, Hub, client, hub
from huggingface_hub import DatasetCard
from safetensors.torch import save
from test_docs import assert_documented

from hf_trak.errors import HubAccessError, IncompleteStoreError, RefusedIndexError, StoreError
from hf_trak.evaluation import Bank, evaluate_bank, random_subsets
from hf_trak.hub import load_bank, push_bank
from hf_trak.hub.banks import bank_card, open_checked
from hf_trak.hub.files import LocalFiles
from hf_trak.store.sealed import CHECKSUM_KEY, content_digest, sealed
from hf_trak.store.shards import checksums

__all__ = ["client", "hub"]  # fixtures

N, M = 13, 4
NAMES = {"bank.json", "parts.json", "README.md", ".gitattributes"}
Files = dict[str, bytes]


def rows(first: int, count: int) -> Dataset:
    return Dataset.from_dict({"x": list(range(first, first + count))})


def outputs(kept: np.ndarray, seed: int) -> np.ndarray:
    """A training of a model that sums sines, with a little noise."""
    noise = np.random.default_rng(seed).normal(size=M)
    return np.array([np.sum(np.sin(kept * (1 + target))) for target in range(M)]) + 0.1 * noise


def make_bank(directory: Path, recipe: dict[str, Any] | None = None) -> Bank:
    """A bank with a part, a repeat of it, and removals."""
    bank = Bank.create(directory, rows(0, N), rows(100, M), recipe)
    masks = random_subsets(N, 6, 0.5)
    bank.add_part("half", masks, protocol={"drop": "mask", "seed": 0, "perturbation": 0.0})
    bank.add_part("half-again", masks[:4], seed=50, repeat_of="half")
    bank.add_part("removed", random_subsets(N, 3, 0.8), repeats=2, removal={"kind": "made up"})
    for name in bank.parts:
        assert bank.build(name, outputs)
    return bank


def files_of(*parts: str) -> set[str]:
    return {
        f"{part}/{file}"
        for part in parts
        for file in ("retraining.json", "subsets.safetensors", "outputs.safetensors")
    }


_published: Files = {}


@pytest.fixture(autouse=True)
def few_resamples(monkeypatch: pytest.MonkeyPatch) -> None:
    """The intervals in cards take most of the time of a push."""
    monkeypatch.setattr("hf_trak.hub.banks.RESAMPLES", 20)


@pytest.fixture
def published(hub: Hub, client: Path, tmp_path: Path) -> Files:
    """Publish a bank, made only once, and return its files."""
    if not _published:
        push_bank(make_bank(tmp_path / "bank", {"title": "sines"}), "tester/bank", token=TOKEN, private=False)
        _published.update(hub.dataset("tester/bank"))
    hub.put("dataset", "tester/bank", _published)
    return dict(_published)


# -- pushing and loading ---------------------------------------------------------------------------------------------


def test_round_trip(hub: Hub, client: Path, tmp_path: Path) -> None:
    bank = make_bank(tmp_path / "bank")
    (bank.directory / "half" / ".hf_trak-tmp-host-1-0123456789abcdef").touch()
    commit = push_bank(bank, "bank", private=True, token=TOKEN)
    assert hub.repos["dataset", "tester/bank"].private
    assert commit.oid == hub.repos["dataset", "tester/bank"].refs["main"]
    assert set(hub.dataset("tester/bank")) == NAMES | files_of(*bank.parts), "no trainings, no temporary files"
    loaded = load_bank("tester/bank", token=TOKEN)
    assert {entry.token for entry in hub.log if "/resolve/" in entry.path} == {TOKEN}
    assert loaded.directory.is_relative_to(client) and loaded.parts == bank.parts
    for name in bank.parts:
        ours, theirs = bank.part(name), loaded.part(name)
        assert all(np.array_equal(getattr(ours, key), getattr(theirs, key)) for key in ("masks", "outputs", "seeds"))
        assert ours.protocol == theirs.protocol and ours.repeat_of == theirs.repeat_of
    scores = np.random.default_rng(0).normal(size=(N, M))
    ours, theirs = (evaluate_bank(b, {"mine": scores}, resamples=20)[0].to_dict() for b in (bank, loaded))
    assert ours == theirs and set(ours["ceilings"]) == {"half-again"}
    loaded.check_rows(rows(0, N), rows(100, M))
    assert load_bank(loaded.directory).parts == bank.parts, "the cache's links to its own files are no others"
    downloads = len(hub.downloads())
    assert load_bank("tester/bank", revision=commit.oid, token=TOKEN).parts == bank.parts
    assert load_bank("tester/bank", local_files_only=True).parts == bank.parts
    assert len(hub.downloads()) == downloads
    with pytest.raises(HubAccessError, match="does not exist"):
        load_bank("tester/bank", token=False, revision="main")


@pytest.mark.slow
def test_the_card_says_what_the_bank_is(
    hub: Hub, client: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bank = make_bank(tmp_path / "bank", {"title": "Sines `|` <b>", "epochs": 3, "url": "https://x.org/a?b=c"})
    push_bank(bank, "tester/bank", token=TOKEN, private=False)
    card = DatasetCard(hub.dataset("tester/bank")["README.md"].decode())
    described = json.loads((bank.directory / "bank.json").read_bytes())
    assert set(card.data.tags) == {"trak", "data-attribution", "hf_trak"} and card.data["viewer"] is False
    ceiling = bank.reliability("half", resamples=20)["half-again"].ceiling_of_one
    for text in (
        described["rows_fingerprint"],
        described["targets_fingerprint"],
        "13 training rows",
        "outputs on 4\ntargets",
        'load_bank("tester/bank")',
        "hf-trak evaluate --bank tester/bank --scores mine=scores.npy",
        "| epochs | 3 |",
        "| url | https://x.org/a?*** |",
        "| title | Sines '&#124;' &lt;b> |",
        f"| `half` | judges scores | 6 | 1 | 53.8 % | drop mask, perturbation 0.0, seed 0 | {ceiling} by half-again |",
        "| `half-again` | repeats half | 4 | 1 | 53.8 % | not told | not measured |",
        "| `removed` | removals | 3 | 2 | 23.1 % | not told | not measured |",
        "@misc{tester-bank,",
        r"howpublished = {\url{https://huggingface.co/datasets/tester/bank}},",
    ):
        assert text in card.text, text
    usage = card.text.split("```python\n")[1].split("```")[0]
    np.save(tmp_path / "scores.npy", np.random.default_rng(0).normal(size=(N, M)))
    monkeypatch.chdir(tmp_path)
    exec(compile(usage, "card", "exec"), {})


@pytest.mark.slow
def test_pushing_again_replaces_the_bank_and_nothing_else(hub: Hub, client: Path, tmp_path: Path) -> None:
    bank = make_bank(tmp_path / "bank")
    first = push_bank(bank, "tester/bank", token=TOKEN, private=False)
    assert push_bank(bank, "tester/bank", token=TOKEN, private=False).oid == first.oid, (
        "nothing changed, so there is no commit"
    )
    text = hub.dataset("tester/bank")["README.md"].decode().replace("# Bank of", "My words.\n\n# Bank of")
    others = {"README.md": text.encode(), "half/notes.txt": b"x", "other/part.txt": b"y"}
    hub.put("dataset", "tester/bank", {**hub.dataset("tester/bank"), **others})
    push_bank(
        bank, "tester/bank", parts=["half", "half-again", "half"], token=TOKEN, commit_message="Fewer", private=False
    )
    found = hub.dataset("tester/bank")
    assert set(found) == NAMES | {"half/notes.txt", "other/part.txt"} | files_of("half", "half-again")
    assert "My words." in found["README.md"].decode() and "`removed`" not in found["README.md"].decode()
    assert load_bank("tester/bank").parts == ["half", "half-again"]
    assert load_bank("tester/bank", revision=first.oid).parts == bank.parts
    # a repo that holds no bank loses nothing, whatever its files are called
    hub.put("dataset", "tester/other", {"strange/retraining.json": b"{}"})
    push_bank(bank, "tester/other", token=TOKEN, private=False)
    assert "strange/retraining.json" in hub.dataset("tester/other")
    with pytest.raises(RefusedIndexError, match=r"a part 'strange', which parts\.json does not name"):
        load_bank("tester/other")


@pytest.mark.slow
def test_branches_and_pull_requests(hub: Hub, client: Path, tmp_path: Path) -> None:
    bank = make_bank(tmp_path / "bank")
    push_bank(bank, "tester/bank", revision="v1", token=TOKEN, private=False)
    assert "bank.json" not in hub.dataset("tester/bank") and load_bank("tester/bank", revision="v1").parts
    commit = push_bank(bank, "tester/bank", create_pr=True, token=TOKEN, private=False)
    assert commit.pr_url and load_bank("tester/bank", revision="refs/pr/1").parts == bank.parts
    with pytest.raises(HubAccessError, match=r"lacks a file|does not exist"):
        load_bank("tester/bank")


def test_a_change_in_the_meantime_is_not_overwritten(
    hub: Hub, client: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def card(repo_id: str, facts: dict[str, Any]) -> str:
        hub.put("dataset", repo_id, {"README.md": b"by somebody else"})
        return bank_card(repo_id, facts)

    monkeypatch.setattr("hf_trak.hub.banks.bank_card", card)
    with pytest.raises(HubAccessError, match="has changed in the meantime"):
        push_bank(make_bank(tmp_path / "bank"), "tester/bank", token=TOKEN, private=False)
    assert hub.dataset("tester/bank") == {"README.md": b"by somebody else"}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["drop", 500])
def test_an_interrupted_push_is_finished_by_the_same_call(hub: Hub, client: Path, tmp_path: Path, kind: Any) -> None:
    bank = make_bank(tmp_path / "bank")
    hub.faults.append(Fault("POST", "/commit/", kind, times=20))
    with pytest.raises(HubAccessError, match="again"):
        push_bank(bank, "tester/bank", token=TOKEN, private=False)
    assert "bank.json" not in hub.dataset("tester/bank")
    hub.faults.clear()
    sent = len(hub.uploads())
    push_bank(bank, "tester/bank", token=TOKEN, private=False)
    assert sent > 0 and len(hub.uploads()) == sent and load_bank("tester/bank").parts == bank.parts


@pytest.mark.parametrize("kind", ["drop", "half", "flip", 503])
@pytest.mark.parametrize("file", ["retraining.json", "outputs.safetensors"])
def test_an_interrupted_load_is_finished_by_the_same_call(
    hub: Hub, client: Path, published: Files, kind: Any, file: str
) -> None:
    hub.faults.append(Fault("GET", f"half-again/{file}", kind))
    for _ in range(2):
        with pytest.raises((HubAccessError, RefusedIndexError)):
            load_bank("tester/bank")
    with pytest.raises(HubAccessError, match="not in the cache"):
        load_bank("tester/bank", local_files_only=True)
    hub.faults.clear()
    assert load_bank("tester/bank").parts == ["half", "half-again", "removed"]


def test_a_reader_that_follows_the_documentation(hub: Hub, client: Path, tmp_path: Path) -> None:
    """docs/formats.md suffices to read a published bank, check it, and judge scores on it."""
    bank = make_bank(tmp_path / "bank", {"title": "größer"})
    push_bank(bank, "tester/bank", token=TOKEN, private=False)
    files = hub.dataset("tester/bank")
    described = {name: json.loads(data) for name, data in files.items() if name.endswith(".json")}
    for content in described.values():
        assert content["format_version"] == 1 and content["checksum"] == canonical(content, "checksum")
    assert described["parts.json"]["parts"] == ["half", "half-again", "removed"]
    n, m = described["bank.json"]["rows"], described["bank.json"]["targets"]
    scores = np.random.default_rng(0).normal(size=(n, m))
    for name in described["parts.json"]["parts"]:
        part = described[f"{name}/retraining.json"]
        assert part["bank"] == canonical(described["bank.json"], "checksum", "format_version")
        found: dict[str, np.ndarray] = {}
        for kind in ("subsets", "outputs"):
            data = files[f"{name}/{kind}.safetensors"]
            (length,) = struct.unpack("<Q", data[:8])
            metadata = json.loads(json.loads(data[8 : 8 + length])["__metadata__"]["hf_trak"])
            run = canonical(part, "checksum", "format_version")
            assert metadata["identity"] == {"kind": f"retraining {kind}", "run": run, "masks": part["masks"]}
            found |= safetensors.numpy.load(data)
        member = np.unpackbits(found["subsets"], axis=1, count=n)
        assert hashlib.sha256(np.packbits(member).tobytes()).hexdigest() == part["masks"]
        repeats, subsets = part["repeats"], part["subsets"]
        seeds = [[(part["seed"] + 1_000_003 * r + i) % 2**31 for i in range(subsets)] for r in range(repeats)]
        assert found["seeds"].tolist() == seeds and found["outputs"].shape == (repeats, subsets, m)
        if part["repeat_of"]:
            first = np.unpackbits(load_tensors(files, part["repeat_of"])["subsets"], axis=1, count=n)
            assert np.array_equal(first[:subsets], member)
        predicted, measured = member @ scores, found["outputs"].mean(axis=0)
        expected = np.mean([scipy.stats.spearmanr(predicted[:, t], measured[:, t]).statistic for t in range(m)])
        result = evaluate_bank(bank, {"mine": scores}, parts=[name], resamples=10)[0]
        assert result.lds.value == pytest.approx(expected, abs=1e-12)


def canonical(content: dict[str, Any], *without: str) -> str:
    """A digest as docs/formats.md says."""
    others = {key: value for key, value in content.items() if key not in without}
    text = json.dumps(others, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return xxhash.xxh3_128_hexdigest(text.encode())


def load_tensors(files: Files, part: str) -> dict[str, np.ndarray]:
    return safetensors.numpy.load(files[f"{part}/subsets.safetensors"])


def test_every_file_of_a_bank_is_documented(hub: Hub, client: Path, tmp_path: Path) -> None:
    bank = make_bank(tmp_path / "bank")
    assert_documented(bank.directory, "bank")
    push_bank(bank, "tester/bank", token=TOKEN, private=False)
    assert_documented(load_bank("tester/bank").directory, "bank")


# -- what is not published -------------------------------------------------------------------------------------------


def test_unfinished_parts_are_not_published(hub: Hub, client: Path, tmp_path: Path) -> None:
    bank = make_bank(tmp_path / "bank")
    bank.add_part("begun", random_subsets(N, 4, 0.5, seed=1))
    bank.build("begun", outputs, job=0, jobs=2)
    with pytest.raises(
        IncompleteStoreError, match=r"\['begun'\] .* lack trainings.*name those to publish with `parts`"
    ):
        push_bank(bank, "tester/bank", token=TOKEN, private=False)
    with pytest.raises(IncompleteStoreError, match="has 2 of 4 trainings"):
        push_bank(bank, "tester/bank", parts=["half", "begun"], token=TOKEN, private=False)
    with pytest.raises(IncompleteStoreError, match="has no part 'nothing'"):
        push_bank(bank, "tester/bank", parts=["nothing"], token=TOKEN, private=False)
    with pytest.raises(ValueError, match=r"'half-again' repeats 'half', which is not among"):
        push_bank(bank, "tester/bank", parts=["half-again"], token=TOKEN, private=False)
    with pytest.raises(ValueError, match="no part to publish"):
        push_bank(bank, "tester/bank", parts=[], token=TOKEN, private=False)
    assert hub.log == []
    push_bank(bank, "tester/bank", parts=["half"], token=TOKEN, private=False)
    assert set(hub.dataset("tester/bank")) == NAMES | files_of("half")
    assert "half-again" not in hub.dataset("tester/bank")["README.md"].decode(), "no score of what is not there"
    assert load_bank(bank.directory).parts == ["begun", "half", "half-again", "removed"], "unfinished, but one's own"


@pytest.mark.parametrize("name", ["half of it", "größe", "half.", "a" * 101, "-x", "\x1b[2Jx"])
def test_names_that_others_cannot_have_are_not_published(hub: Hub, client: Path, tmp_path: Path, name: str) -> None:
    bank = Bank.create(tmp_path / "bank", rows(0, N), rows(100, M))
    if name.isprintable():
        bank.add_part(name, random_subsets(N, 4))
        bank.build(name, outputs)
    else:
        bank.add_part("plain", random_subsets(N, 4))
        bank.build("plain", outputs)
        os.rename(bank.directory / "plain", bank.directory / name)
    with pytest.raises(ValueError, match=r"Expected letters, digits and|control character"):
        push_bank(bank, "tester/bank", token=TOKEN, private=False)
    assert hub.log == []


@pytest.mark.parametrize("secret", [TOKEN, "https://me:word@x.org/rows"])
def test_secrets_are_not_published(hub: Hub, client: Path, tmp_path: Path, secret: str) -> None:
    bank = make_bank(tmp_path / "bank", {"source": secret})
    with pytest.raises(ValueError, match=r"bank\.json holds a token of the Hub, or an address") as caught:
        push_bank(bank, "tester/bank", token=TOKEN, private=False)
    assert secret not in str(caught.value) and hub.log == []


def test_damaged_and_large_parts_are_not_published(
    hub: Hub, client: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bank = make_bank(tmp_path / "bank")
    for limit, reason in (("MAX_SUBSETS_BYTES", "subsets"), ("MAX_OUTPUTS_BYTES", "outputs")):
        with monkeypatch.context() as patched:
            patched.setattr(f"hf_trak.hub.banks.{limit}", 100)
            with pytest.raises(
                ValueError, match=rf"{reason}\.safetensors has \d+ bytes, and readers take at most 100"
            ):
                push_bank(bank, "tester/bank", token=TOKEN, private=False)
    path = bank.directory / "half" / "outputs.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(StoreError, match=r"outputs\.safetensors cannot be used"):
        push_bank(bank, "tester/bank", token=TOKEN, private=False)
    assert hub.log == []


def test_a_public_repo_is_not_written_to_as_private(hub: Hub, client: Path, tmp_path: Path) -> None:
    hub.put("dataset", "tester/public", {})
    with pytest.raises(ValueError, match="is public"):
        push_bank(make_bank(tmp_path / "bank"), "tester/public", private=True, token=TOKEN)
    assert hub.dataset("tester/public") == {}


# -- banks of malicious publishers -----------------------------------------------------------------------------------


def edited(files: Files, name: str, /, **changes: Any) -> Files:
    """Change a JSON file and its checksum with it, as an attacker can; `...` removes a key."""
    content = json.loads(files[name])
    content.update(changes)
    content = {key: value for key, value in content.items() if value is not ...}
    content[CHECKSUM_KEY] = content_digest(content)
    return {**files, name: json.dumps(content).encode()}


def rebuilt(files: Files, **changes: Any) -> Files:
    """Change `bank.json`, and make all other files belong to it: what an attacker can do at worst."""
    files = edited(files, "bank.json", **changes)
    bank, n = digest(files["bank.json"]), json.loads(files["bank.json"])["rows"]
    for name in ("half", "half-again", "removed"):
        files = repart(files, name, bank=bank, rows=n)
    return edited(files, "parts.json", bank=bank)


def repart(files: Files, name: str, /, **changes: Any) -> Files:
    """Change a part's description, and make its tensors belong to it."""
    files = edited(files, f"{name}/retraining.json", **changes)
    for kind in ("subsets", "outputs"):
        files = retensored(files, f"{name}/{kind}.safetensors", run=digest(files[f"{name}/retraining.json"]))
    return files


def digest(data: bytes) -> str:
    return content_digest({key: value for key, value in json.loads(data).items() if key != "format_version"})


def retensored(
    files: Files, name: str, tensors: dict[str, torch.Tensor] | None = None, header: dict[str, Any] | None = None,
    **identity: Any,
) -> Files:  # fmt: skip
    """Replace tensors, the header of the file, or the identity in it, and update the checksums."""
    data = files[name]
    (length,) = struct.unpack("<Q", data[:8])
    old = json.loads(data[8 : 8 + length])
    metadata = json.loads(old["__metadata__"]["hf_trak"])
    metadata.pop(CHECKSUM_KEY)
    metadata["identity"] |= identity
    if tensors is not None:
        metadata["tensors"] = checksums(tensors)
    text = {"hf_trak": json.dumps(sealed(metadata))}
    if tensors is not None:
        return {**files, name: save(tensors, text)}
    changed = json.dumps({**old, **(header or {}), "__metadata__": text}).encode()
    return {**files, name: struct.pack("<Q", len(changed)) + changed + data[8 + length :]}


def again(files: Files, name: str) -> Files:
    """Add a copy of a part that says that it repeats it."""
    copies = {path.replace(f"{name}/", "again/"): data for path, data in files.items() if path.startswith(f"{name}/")}
    names = json.loads(files["parts.json"])["parts"]
    return repart(parts({**files, **copies}, *names, "again"), "again", name="again", repeat_of=name, removal=None)


def without(files: Files, *names: str) -> Files:
    return {name: data for name, data in files.items() if name not in names}


def parts(files: Files, *names: Any) -> Files:
    return edited(files, "parts.json", parts=list(names))


def moved(files: Files, old: str, new: str) -> Files:
    """Give a part another name, and name it in `parts.json`."""
    files = {name.replace(f"{old}/", f"{new}/"): data for name, data in files.items()}
    return parts(files, *(new if name == old else name for name in json.loads(files["parts.json"])["parts"]))


def flipped(files: Files, name: str, place: int) -> Files:
    data = bytearray(files[name])
    data[place] ^= 1
    return {**files, name: bytes(data)}


def outputs_with(value: float) -> dict[str, torch.Tensor]:
    values = torch.zeros(1, 6, M, dtype=torch.float64)
    values[0, 3, 1] = value
    return {"outputs": values, "seeds": torch.zeros(1, 6, dtype=torch.int64)}


def subsets_of(value: int) -> dict[str, torch.Tensor]:
    return {"subsets": torch.full((6, 2), value, dtype=torch.uint8)}


PART, SUB, OUT = (f"half/{file}" for file in ("retraining.json", "subsets.safetensors", "outputs.safetensors"))
HUGE = {"outputs": {"dtype": "F64", "shape": [1, 6, 10**15], "data_offsets": [0, 48 * 10**15]}}
NESTED = b'{"a":' * 5000 + b"1" + b"}" * 5000

BAD: dict[str, tuple[Callable[[Files], Files], str]] = {
    # names of parts
    "a part above the directory": (lambda f: parts(f, "../half"), "no plain name of a directory"),
    "a part elsewhere": (lambda f: parts(f, "/tmp/half"), "no plain name of a directory"),
    "a part two levels down": (lambda f: parts(f, "a/half"), "no plain name of a directory"),
    "a part above, as Windows writes it": (lambda f: parts(f, "..\\half"), "no plain name of a directory"),
    "a hidden part": (lambda f: moved(f, "half", ".half"), "no plain name of a directory"),
    "a part with a name for terminals": (lambda f: moved(f, "half", "\x1b[2Jhalf"), "no plain name of a directory"),
    "a part without a name": (lambda f: parts(f, ""), "no plain name of a directory"),
    "a part with a name that is a number": (lambda f: parts(f, 3), "the part 3, which is no plain name"),
    "a part that is named twice": (lambda f: parts(f, "half", "half"), "names a part twice"),
    "no part": (lambda f: parts(f), "does not name the parts"),
    "parts that are no list": (lambda f: edited(f, "parts.json", parts="half"), "does not name the parts"),
    "a manifest of something else": (lambda f: edited(f, "parts.json", kind="index"), "does not name the parts"),
    "a part that is not named": (lambda f: parts(f, "half", "removed"), "a part 'half-again', which"),
    "a part that is not there": (
        lambda f: parts(f, "half", "half-again", "removed", "x"),
        r"x/retraining\.json of .* was refused: it is missing",
    ),
    # files that are missing, or of another bank
    "no description": (lambda f: without(f, "bank.json"), r"bank\.json of .* was refused: it is missing"),
    "no outputs": (lambda f: without(f, OUT), f"{OUT} of .* was refused: it is missing"),
    "no subsets": (lambda f: without(f, SUB), f"{SUB} of .* was refused: it is missing"),
    "another bank": (lambda f: edited(f, "bank.json", recipe={}), "belongs to another bank.json"),
    "a part of another bank": (lambda f: {**rebuilt(f, rows=14), PART: f[PART]}, "belongs to another bank"),
    "outputs of another part": (lambda f: {**f, OUT: f["half-again/outputs.safetensors"]}, "belongs to another run"),
    "subsets for outputs": (lambda f: {**f, OUT: f[SUB]}, "belongs to another run"),
    "outputs of another description": (lambda f: edited(f, PART, seed=9), "belongs to another run"),
    "subsets of another part": (lambda f: retensored(f, SUB, run="0" * 32), "belongs to another run"),
    # damage
    "a flipped bit of an output": (lambda f: flipped(f, OUT, -1), "the checksum of its tensors"),
    "a flipped bit of a subset": (lambda f: flipped(f, SUB, -1), "the checksum of its tensors"),
    "a flipped bit of a description": (
        lambda f: {**f, PART: f[PART].replace(b'"seed": 0', b'"seed": 1')},
        "its content has another checksum",
    ),
    "truncated outputs": (lambda f: {**f, OUT: f[OUT][:-1]}, r"bytes, not|cannot be read"),
    "an empty file": (lambda f: {**f, OUT: b""}, "0 bytes, not"),
    "a pickle": (lambda f: {**f, OUT: b"\x80\x04" + b"c" * 600}, "not a safetensors file|bytes, not"),
    "other subsets with their checksum": (lambda f: retensored(f, SUB, subsets_of(7)), "holds other subsets than"),
    "NaN": (lambda f: retensored(f, OUT, outputs_with(float("nan"))), "NaN or infinite"),
    "infinity": (lambda f: retensored(f, OUT, outputs_with(float("inf"))), "NaN or infinite"),
    # numbers that would take memory
    "more rows than there can be": (lambda f: rebuilt(f, rows=10**15), "more than the 268435456"),
    "more targets than there can be": (lambda f: rebuilt(f, targets=10**15), "more than the 1073741824"),
    "more subsets than there can be": (lambda f: repart(f, "half", subsets=10**15), "more than the"),
    "more repeats than there can be": (lambda f: repart(f, "half", repeats=10**15), "more than the"),
    "a number of 60 digits": (lambda f: rebuilt(f, rows=10**60), "more than the"),
    "twice the targets": (lambda f: rebuilt(f, targets=2 * M), "bytes, not|expected torch.float64"),
    "no rows": (lambda f: rebuilt(f, rows=0), "0 rows"),
    "negative targets": (lambda f: rebuilt(f, targets=-4), "-4 targets"),
    "no subsets in a part": (lambda f: repart(f, "half", subsets=0), "0 subsets"),
    "a huge shape in a header": (lambda f: retensored(f, OUT, header=HUGE), "cannot be read|cannot be used"),
    "a header beyond the file": (lambda f: {**f, OUT: struct.pack("<Q", 1 << 40) + f[OUT][8:]}, "header of"),
    # types
    "rows that are a text": (lambda f: rebuilt(f, rows="13"), "no valid rows"),
    "rows that are true": (lambda f: rebuilt(f, rows=True), "no valid rows"),
    "a recipe that is a list": (lambda f: rebuilt(f, recipe=[]), "no valid recipe"),
    "a description without its bank": (lambda f: repart(f, "half", bank=...), "of another type"),
    "a repeat of a list": (lambda f: repart(f, "half-again", repeat_of=["half"]), "of another type"),
    "removals that are a text": (lambda f: repart(f, "removed", removal="x"), "of another type"),
    "a part of another name": (lambda f: repart(f, "half", name="removed"), "is that of the part 'removed'"),
    "a repeat of other subsets": (lambda f: repart(f, "removed", repeat_of="half", removal=None), "does not repeat"),
    "a repeat of a part with repeats": (lambda f: again(f, "removed"), "does not repeat subsets of 'removed'"),
    # JSON
    "JSON that is nested too deeply": (lambda f: {**f, PART: NESTED}, "nested"),
    "JSON that is a list": (lambda f: {**f, "bank.json": b"[1, 2]"}, "a JSON list"),
    "JSON without a checksum": (lambda f: edited(f, PART, format_version=...), "format version None"),
    "JSON of a later version": (lambda f: edited(f, "bank.json", format_version=3), "format version 3"),
    "JSON with many values": (lambda f: {**f, "bank.json": b'{"a": [' + b"[]," * 9000 + b"0]}"}, "values in"),
}  # fmt: skip


def below(directory: Path) -> set[str]:
    return {os.fspath(path) for path in directory.rglob("*") if path.is_file() and path.suffix != ".lock"}


@pytest.mark.parametrize("what", BAD)
def test_a_bad_bank_is_refused(hub: Hub, client: Path, tmp_path: Path, published: Files, what: str) -> None:
    """Both on the Hub and as a clone; nothing is written outside of the cache."""
    change, reason = BAD[what]
    bad = change(published)
    assert bad != published
    hub.put("dataset", "tester/bank", bad)
    before = below(tmp_path)
    with pytest.raises(
        RefusedIndexError, match=reason if "refused" in reason else f"was refused: .*({reason})"
    ) as caught:
        load_bank("tester/bank")
    assert "Expected a bank that `push_bank` has published: use another revision" in str(caught.value)
    assert "\x1b" not in str(caught.value)
    assert all(Path(path).is_relative_to(client) for path in below(tmp_path) - before)
    assert set(hub.downloads()) <= set(published) | files_of("again"), "nothing else is asked for"
    clone = tmp_path / "clone"
    for name, data in bad.items():
        (clone / name).parent.mkdir(parents=True, exist_ok=True)
        (clone / name).write_bytes(data)
    if what == "a part that is not named":
        assert load_bank(clone).parts == ["half", "half-again", "removed"], "it was added to the copy"
    elif what == "no outputs":
        assert not set(evaluated(load_bank(clone))) & {"half"}, "it may be unfinished in a directory"
    else:
        with pytest.raises(StoreError):
            load_bank(clone)


def evaluated(bank: Bank) -> list[str]:
    try:
        return [result.part for result in evaluate_bank(bank, {"zero": np.zeros((N, M))}, resamples=10)]
    except StoreError:
        return []


def test_large_files_are_refused_before_they_are_downloaded(
    hub: Hub, client: Path, published: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hf_trak.hub.files.MAX_JSON_BYTES", 1 << 19)
    monkeypatch.setattr("hf_trak.hub.banks.MAX_JSON_BYTES", 1 << 19)
    for name in (*published.keys() & {"bank.json", "parts.json"}, "half/retraining.json", OUT, SUB):
        before = len(hub.downloads())
        hub.put("dataset", "tester/bank", {**published, name: published[name] + b" " * (1 << 20)})
        with pytest.raises(RefusedIndexError, match=r"more than the|bytes, not \d+ to \d+"):
            load_bank("tester/bank")
        assert name not in hub.downloads()[before:]


def test_names_in_the_repo_are_never_asked_for(hub: Hub, client: Path, published: Files) -> None:
    strange = ("../../../outside", "/etc/x", "half/../../y", "C:\\z", "half/trainings/a.safetensors", "half/model.bin")
    hub.put("dataset", "tester/bank", {**published, **dict.fromkeys(strange, b"x")})
    assert load_bank("tester/bank").parts == ["half", "half-again", "removed"]
    assert set(hub.downloads()) <= set(published)
    hub.put("dataset", "tester/bank", {**published, "../retraining.json": b"{}"})
    with pytest.raises(RefusedIndexError, match=r"it has a part '\.\.', which"):
        load_bank("tester/bank")


def test_links_in_a_clone_are_refused(published: Files, client: Path, tmp_path: Path) -> None:
    """A link would lead a reader to other files of this machine."""
    secret = tmp_path / "secret"
    secret.mkdir()
    for name, data in published.items():
        (tmp_path / "clone" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "clone" / name).write_bytes(data)
    for link in ("half/outputs.safetensors", "bank.json", "removed", "half/other"):
        clone = tmp_path / "linked"
        shutil.copytree(tmp_path / "clone", clone)
        target = clone / link
        if target.exists():
            shutil.move(target, secret / "moved")
        target.symlink_to(secret / "moved")
        with pytest.raises(RefusedIndexError, match="it is a link to"):
            load_bank(clone)
        with pytest.raises(RefusedIndexError, match="it is a link to"):
            open_checked(LocalFiles(clone))
        shutil.rmtree(clone)
        shutil.rmtree(secret)
        secret.mkdir()


def test_parts_that_another_program_put_into_the_cache_are_refused(
    hub: Hub, client: Path, published: Files, tmp_path: Path
) -> None:
    root = load_bank("tester/bank").directory
    shutil.copytree(root / "half", root / "extra")
    with pytest.raises(RefusedIndexError, match="it has a part 'extra'"):
        load_bank("tester/bank")


def test_damage_in_a_directory_is_noticed_when_it_is_opened(client: Path, tmp_path: Path) -> None:
    bank = make_bank(tmp_path / "bank")
    assert load_bank(bank.directory).parts == bank.parts
    path = bank.directory / "removed" / "outputs.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    with pytest.raises(StoreError, match="the checksum of its tensors"):
        load_bank(bank.directory)
    assert path.exists()


def test_what_is_no_bank(hub: Hub, client: Path, tmp_path: Path) -> None:
    with pytest.raises(IncompleteStoreError, match=r"holds no bank: bank\.json is missing"):
        load_bank(tmp_path)
    with pytest.raises(HubAccessError, match="neither a directory nor the name of a repo"):
        load_bank(tmp_path / "nothing")
    with pytest.raises(HubAccessError, match="does not exist"):
        load_bank("tester/nothing")
    hub.put("dataset", "tester/rows", {"rows.json": b"{}"})
    with pytest.raises(HubAccessError, match="lacks a file that is needed"):
        load_bank("tester/rows")
    assert not hub.downloads("rows")
