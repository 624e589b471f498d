"""Rows are identified by type and content, in an encoding from which they could be told apart without the hash."""

import datetime
import decimal
import enum
import math
import uuid
from collections import OrderedDict, UserDict, deque, namedtuple
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
import xxhash
from datasets import Array2D, Audio, ClassLabel, Dataset, Features, Image, List, Value
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image as PILImage
from store_jobs import Job

from hf_trak.data import rows as data
from hf_trak.identity.row_digest import (
    _encoded,
    fingerprint_dataset,
    update_digest,
)


def digest_of(value: Any) -> str:
    digest = xxhash.xxh3_128()
    update_digest(digest, value)
    return digest.hexdigest()


scalars = (
    st.none()
    | st.booleans()
    | st.integers(-3, 3)
    | st.integers()
    | st.floats()
    | st.sampled_from([0.0, -0.0, 1.0, "1", "", b"", b"1", "None", 2**63, -(2**63), 2**63 - 1])
    | st.text(max_size=3)
    | st.binary(max_size=3)
)
keys = st.none() | st.booleans() | st.integers(-2, 2) | st.text(max_size=2) | st.binary(max_size=2)
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(keys, inner, max_size=3)
        | st.sets(keys, max_size=3)
    ),
    max_leaves=8,
)


def same(a: Any, b: Any) -> bool:
    """Equal in type and content at every level; floats by their bits."""
    if type(a) is not type(b):
        return False
    if isinstance(a, float):
        return np.float64(a).tobytes() == np.float64(b).tobytes()
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        pairs = {(type(key), key): value for key, value in b.items()}
        return len(a) == len(b) and all(
            (type(key), key) in pairs and same(value, pairs[type(key), key]) for key, value in a.items()
        )
    if isinstance(a, set):
        return {(type(item), item) for item in a} == {(type(item), item) for item in b}
    return bool(a == b)


@pytest.mark.slow
@settings(max_examples=700, deadline=None)
@given(st.lists(values, max_size=3), st.lists(values, max_size=3))
def test_sequences_of_values_have_the_same_bytes_only_if_they_are_the_same(a: list[Any], b: list[Any]) -> None:
    """Without a frame around them: no value's bytes begin with those of another one."""
    together = [b"".join(_encoded(value, 0) for value in some) for some in (a, b)]
    assert (together[0] == together[1]) == same(a, b)


class Colour(enum.IntEnum):
    RED = 1


Pair = namedtuple("Pair", "a b")
Reversed = namedtuple("Reversed", "b a")


@dataclass
class Point:
    x: float
    y: float


@dataclass(frozen=True, slots=True)
class Slotted:
    x: float


class Plain:
    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)


class WithSlots:
    __slots__ = ("a",)

    def __init__(self, a: Any) -> None:
        self.a = a


class Words(list):
    pass


def palette_image(colours: list[int], transparency: int | None = None) -> Any:
    image = PILImage.new("P", (2, 2), 1)
    image.putpalette(colours)
    if transparency is not None:
        image.info["transparency"] = transparency
    return image


DISTINCT: list[Any] = [
    *(["ab", "c"], ["a", "bc"], ("ab", "c"), ["abc"], "abc", b"abc", {"abc"}, ["a", ["bc"]], [["a"], "bc"]),
    *(1, True, 1.0, "1", b"1", 1 + 0j, np.int64(1), np.float32(1), np.float64(1), np.bool_(True), Colour.RED),
    *(decimal.Decimal(1), Fraction(1), 0, False, 0.0, -0.0, -1, 255, 256, -256, 2**64, 2**63, float("inf"), math.nan),
    *(None, "None", [], (), {}, set(), "", b"", [None], [[]], [0], [0.0], [False], [0, False], [2**63, 1], ...),
    *({1: 2}, {"1": 2}, {True: 2}, {1: "2"}, {"a": 1, "b": 2}, {"a": 2, "b": 1}, {"a": {"b": 1}}, {("a", "b"): 1}),
    *(Pair(1, 2), Reversed(1, 2), (1, 2), [1, 2], Point(1.0, 2.0), Point(2.0, 1.0), Slotted(1.0), Slotted(2.0)),
    *(Plain(a=1), Plain(b=1), Plain(a=[1]), WithSlots(1), WithSlots(2), Words([1, 2]), Words([2, 1]), deque([1, 2])),
    *(
        deque([1, 2], 3),
        range(3),
        range(4),
        slice(0, 3),
        int,
        float,
        len,
        print,
        uuid.UUID(int=1),
        Path("/a"),
        Path("/b"),
    ),
    *(datetime.date(2024, 1, 2), datetime.datetime(2024, 1, 2), datetime.datetime(2024, 1, 2, tzinfo=datetime.UTC)),
    *(datetime.timedelta(1), memoryview(b"abc"), torch.float32, torch.float64),
    *(np.zeros(4, np.float32), np.zeros(4, np.int32), np.zeros((2, 2), np.float32), np.zeros((4, 1), np.float32)),
    *(np.zeros(4, ">f4"), np.zeros(2, np.float64), np.array([]), np.array([], np.int32), np.zeros((0, 2))),
    *(np.array(["a", "b"]), np.array(["a", "b"], object), np.array(["a", 1], object), np.array([["a", 1]], object)),
    *(np.array([(1, 2.0)], [("a", "i4"), ("b", "f8")]), np.array([(1, 2.0)], [("b", "i4"), ("a", "f8")])),
    *(np.array(["a"], np.dtypes.StringDType()), np.array(["b"], np.dtypes.StringDType()), np.longdouble(1)),
    *(np.ma.masked_array([1, 2], [True, False]), np.ma.masked_array([1, 2], [False, True])),
    *(np.array(["2024-01-01"], "M8[D]"), np.array(["2024-01-01"], "M8[s]"), np.array([1], "m8[D]")),
    *(torch.zeros(4), torch.zeros(2, 2), torch.zeros(4, dtype=torch.int32), torch.zeros(8, dtype=torch.bfloat16)),
    *(torch.zeros(8, dtype=torch.half), torch.tensor(0.0), torch.zeros(0), torch.zeros(0, 1), torch.tensor([-0.0])),
    *(torch.eye(2), torch.eye(2).to_sparse(), torch.tensor([1j]), torch.tensor([-1j])),
    *(PILImage.new("L", (2, 3), 0), PILImage.new("L", (3, 2), 0), PILImage.new("RGB", (2, 1), 0)),
    *(PILImage.new("P", (2, 3), 0), PILImage.new("RGB", (1, 2), 0), PILImage.new("RGBA", (1, 2), 0)),
    *(palette_image([0, 0, 0, 9, 9, 9]), palette_image([0, 0, 0, 9, 9, 8]), palette_image([0, 0, 0, 9, 9, 9], 1)),
]


def test_values_that_differ_in_type_or_content_have_other_digests() -> None:
    digests: dict[str, Any] = {}
    for value in DISTINCT:
        found = digests.setdefault(digest_of(value), value)
        assert found is value, f"{value!r} ({type(value)}) is taken for {found!r} ({type(found)})"
    nans = np.array([0x7FF8000000000000, 0x7FF8000000000001], np.uint64).view(np.float64)
    assert digest_of(float(nans[0])) != digest_of(float(nans[1])), "the payload of a NaN"


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"a": 1, "b": [2]}, OrderedDict(b=[2], a=1)),
        ({"a": 1}, UserDict(a=1)),
        ({1, "a", None, (2, 3)}, {(2, 3), None, "a", 1}),
        (frozenset("abcdef"), frozenset("fedcba")),
        (np.arange(6).reshape(2, 3).T, np.ascontiguousarray(np.arange(6).reshape(2, 3).T)),
        (torch.arange(6).reshape(2, 3).T, torch.arange(6).reshape(2, 3).T.contiguous()),
        (torch.ones(3, requires_grad=True), torch.ones(3)),
        (torch.tensor([1j]).conj(), torch.tensor([complex(0.0, -1.0)])),
        (b"ab", bytearray(b"ab")),
        (np.float32(2), np.array(2, np.float32)),
    ],
)
def test_the_same_content_has_the_same_digest(first: Any, second: Any) -> None:
    assert digest_of(first) == digest_of(second)


def test_pixels_read_from_files_are_those_in_memory(tmp_path: Path) -> None:
    """Files are decoded lazily; a turned photo and the later frames of a film are part of the content."""
    pixels = PILImage.fromarray(np.arange(48, dtype=np.uint8).reshape(4, 4, 3))
    pixels.save(tmp_path / "a.png")
    with PILImage.open(tmp_path / "a.png") as image:
        assert digest_of(image) == digest_of(pixels)
    exif = PILImage.Exif()
    exif[0x0112] = 6
    pixels.save(tmp_path / "b.png", exif=exif)
    with PILImage.open(tmp_path / "b.png") as image:
        assert digest_of(image) != digest_of(pixels)
    frames = [PILImage.new("L", (4, 4), level) for level in (0, 100, 200)]
    films = []
    for last in (frames[1], frames[2]):
        frames[0].save(path := tmp_path / "film.gif", save_all=True, append_images=[last])
        with PILImage.open(path) as film:
            films.append(digest_of(film))
            assert film.tell() == 0
    assert films[0] != films[1]


@pytest.mark.parametrize("value", [object(), lambda: 0, [object()], {"a": {"b": object()}}, WithSlots(object())])
def test_what_has_no_content_is_refused(value: Any) -> None:
    """Its representation holds an address in memory, which is another one in every process."""
    with pytest.raises(
        TypeError, match=r"whose content cannot be hashed.*Give the dataset an attribute `fingerprint`"
    ):
        digest_of(value)


def test_open_files_meta_tensors_and_values_that_contain_themselves_are_refused(tmp_path: Path) -> None:
    with (tmp_path / "x").open("w") as file, pytest.raises(TypeError, match=r"holds a _io\.TextIOWrapper"):
        digest_of(file)
    with pytest.raises(TypeError, match=r"holds a torch\.Tensor"):
        digest_of(torch.ones(2, device="meta"))
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(TypeError, match="a list at more than 100 levels of nesting, or one that contains itself"):
        digest_of(endless)
    chained = Plain()
    chained.next = chained  # type: ignore[attr-defined]
    with pytest.raises(TypeError, match="more than 100 levels"):
        digest_of(chained)


def digests_of_sets() -> list[str]:
    values = (set("abcdefg"), {"b": 1, "a": {2, 3}}, Plain(x={"u", "v"}), Colour.RED)
    return [digest_of(value) for value in values]


@pytest.mark.slow
@pytest.mark.usefixtures("jobs_with_one_thread")
def test_digests_are_the_same_in_every_process(tmp_path: Path) -> None:
    """Whatever the hash seed of the process, which decides the order of sets: jobs have another one."""
    assert Job(tmp_path / "report.json", digests_of_sets).wait() == {"value": digests_of_sets()}


def test_tv_tensors_carry_their_format() -> None:
    tv = pytest.importorskip("torchvision.tv_tensors")
    boxes = [tv.BoundingBoxes(torch.ones(1, 4), format=kind, canvas_size=(9, 9)) for kind in ("XYXY", "XYWH")]
    plain = torch.ones(1, 4)
    assert len({digest_of(value) for value in (*boxes, tv.Image(plain), tv.Mask(plain), plain)}) == 5


def features(**changes: Any) -> Dataset:
    """One row with the features of the dataset that are no data: names of classes, modes, rates."""
    kinds = {
        "label": ClassLabel(names=["cat", "dog"]),
        "image": Image(),
        "audio": Audio(sampling_rate=8000),
        "nested": {"images": List(Image())},
        "matrix": Array2D((1, 2), "float32"),
        "text": Value("string"),
    }
    held = {"bytes": b"x", "path": None}
    row = {"label": 0, "image": held, "audio": held, "nested": {"images": [held]}, "matrix": [[1.0, 2.0]], "text": "a"}
    described = Features({**kinds, **changes})
    arrays = [
        pa.array([row[name]], kind.storage_type if isinstance(kind, pa.ExtensionType) else kind)
        for name, kind in zip(described.arrow_schema.names, described.arrow_schema.types, strict=True)
    ]
    arrays = [
        pa.ExtensionArray.from_storage(kind, values) if isinstance(kind, pa.ExtensionType) else values
        for values, kind in zip(arrays, described.arrow_schema.types, strict=True)
    ]
    return Dataset(pa.Table.from_arrays(arrays, schema=described.arrow_schema))


def test_features_of_a_dataset_are_part_of_it() -> None:
    changed = [
        features(label=ClassLabel(names=["dog", "cat"])),
        features(label=Value("int64")),
        features(image=Image(mode="L")),
        features(image=Image(mode="RGB")),
        features(image=Image(decode=False)),
        features(audio=Audio(sampling_rate=16000)),
        features(audio=Audio(sampling_rate=8000, num_channels=1)),
        features(nested={"images": List(Image(mode="L"))}),
        features(text=Value("large_string")),
        features(matrix=List(List(Value("float32")))),
    ]
    assert len({fingerprint_dataset(dataset) for dataset in (features(), *changed)}) == len(changed) + 1
    assert fingerprint_dataset(features()) == fingerprint_dataset(features())


def test_sizes_of_files_that_are_named_by_path_are_part_of_a_dataset(tmp_path: Path) -> None:
    for name in ("a", "b"):
        PILImage.new("L", (4, 4), 7).save(tmp_path / f"{name}.png")
    paths = [str(tmp_path / f"{name}.png") for name in ("a", "b", "missing")]
    flat = Dataset.from_dict({"image": paths}, features=Features({"image": Image()}))
    nested = Dataset.from_dict({"x": [{"y": paths}]}, features=Features({"x": {"y": List(Image())}}))
    before = [fingerprint_dataset(dataset) for dataset in (flat, nested)]
    assert [fingerprint_dataset(dataset) for dataset in (flat, nested)] == before
    PILImage.fromarray(np.arange(4096, dtype=np.uint8).reshape(64, 64)).save(tmp_path / "b.png")
    changed = [fingerprint_dataset(dataset) for dataset in (flat, nested)]
    assert changed[0] != before[0] and changed[1] != before[1]
    PILImage.new("L", (4, 4), 7).save(tmp_path / "missing.png")
    assert fingerprint_dataset(flat) != changed[0]
    other = {"bytes": b"x", "path": str(tmp_path / "c.png")}
    embedded = Dataset.from_dict({"image": [other]}, features=Features({"image": Image()}))
    held = fingerprint_dataset(embedded)
    Path(other["path"]).write_bytes(b"y")
    assert fingerprint_dataset(embedded) == held, "its bytes are in the dataset"


def test_kinds_of_datasets_do_not_meet() -> None:
    class Named(list):
        fingerprint = "1"

    assert fingerprint_dataset(Named(["1"])) != fingerprint_dataset(["1"])
    assert fingerprint_dataset([["ab", "c"]]) != fingerprint_dataset([["a", "bc"]])


def test_rows_that_cannot_be_hashed_are_refused() -> None:
    with pytest.raises(TypeError, match=r"A row holds a builtins\.object \(<object object at .*`fingerprint`"):
        fingerprint_dataset([{"x": object()}])


def test_data_keeps_the_names() -> None:
    assert data.fingerprint_dataset is fingerprint_dataset and data.update_digest is update_digest
