"""The probe of collators and transforms: what differs is said by column, rounding is not, random rows are refused."""

import json
import random
from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from PIL import Image as PILImage
from torch.utils.data import default_collate
from transformers import (
    BatchEncoding,
    BertTokenizerFast,
    DataCollatorForLanguageModeling,
    DataCollatorForSeq2Seq,
    DataCollatorWithPadding,
    ViTImageProcessor,
    default_data_collator,
)

from hf_trak.identity.collation import Collate, check_repeatable, collation_changes, collation_of, probe_rows

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{i}" for i in range(30))]
PROBE = [0, 1, 2, 3, 5, 9]


def tokenizer(**options: Any) -> BertTokenizerFast:
    return BertTokenizerFast(vocab={word: i for i, word in enumerate(WORDS)}, **options)


def texts(count: int = 10) -> Dataset:
    drawn = random.Random(0)
    rows = [" ".join(drawn.choices(WORDS[5:], k=4 + i % 5)) for i in range(count)]
    return Dataset.from_dict({"text": rows, "labels": [i % 2 for i in range(count)]})


def tokens(**call: Any) -> Dataset:
    return texts().map(lambda rows: tokenizer()(rows["text"], **call), batched=True, remove_columns="text")


def photos(transform: Callable[[Any], torch.Tensor], count: int = 10) -> Dataset:
    drawn = np.random.default_rng(0).integers(0, 256, (count, 40, 40, 3), dtype=np.uint8)
    dataset = Dataset.from_dict({"image": [image.tolist() for image in drawn], "labels": [0] * count})
    return dataset.with_transform(
        lambda rows: {
            "pixel_values": [transform(PILImage.fromarray(np.array(image, np.uint8))) for image in rows["image"]],
            "labels": rows["labels"],
        }
    )


def collating(dataset: Any, collator: Callable[[list[Any]], Any] = default_data_collator) -> Collate:
    return lambda rows: collator([dataset[row] for row in rows])


def changes(first: Collate, second: Collate, rows: list[int] = PROBE) -> list[str]:
    """What a store would say: descriptions go through JSON."""
    saved, given = (json.loads(json.dumps(collation_of(each, rows), allow_nan=False)) for each in (first, second))
    assert collation_changes(saved, saved) == []
    return collation_changes(saved, given)


def of(batch: Any) -> Collate:
    return lambda rows: batch


def test_probed_rows_are_few_and_fixed() -> None:
    assert probe_rows(1000) == [0, 1, 2, 333, 500, 999]
    assert probe_rows(1000, sequential=True) == [0, 1, 2]
    assert [probe_rows(n) for n in (1, 2, 3, 4, 5)] == [[0], [0, 1], [0, 1, 2], [0, 1, 2, 3], [0, 1, 2, 4]]
    assert probe_rows(2, sequential=True) == [0, 1]


def test_padding_truncation_and_casing_of_a_tokenizer_are_seen() -> None:
    def tokenizing(**options: Any) -> Collate:
        given = {"padding": True, "return_tensors": "pt", **options.pop("call", {})}
        words, dataset = tokenizer(**options), texts()
        return lambda rows: words([dataset[row]["text"] for row in rows], **given)

    plain = tokenizing()
    assert changes(plain, tokenizing()) == []
    assert changes(plain, tokenizing(padding_side="left")) == [
        "input_ids: other values in the rows [0, 1, 2, 3, 5] (torch.int64 of shape (6, 10))",
        "attention_mask: other values in the rows [0, 1, 2, 3, 5] (torch.int64 of shape (6, 10))",
    ]
    assert changes(plain, tokenizing(call={"truncation": True, "max_length": 6})) == [
        f"{name}: saved torch.int64 of shape (6, 10), given torch.int64 of shape (6, 6)"
        for name in ("input_ids", "token_type_ids", "attention_mask")
    ]
    assert changes(plain, tokenizing(call={"return_token_type_ids": False})) == [
        "token_type_ids: saved torch.int64 of shape (6, 10), given no such column"
    ]
    assert len(changes(plain, tokenizing(call={"add_special_tokens": False}))) == 3
    other = BertTokenizerFast(vocab={word: i for i, word in enumerate([*WORDS[:5], *WORDS[:4:-1]])})
    dataset = texts()
    swapped = changes(plain, lambda rows: other([dataset[r]["text"] for r in rows], padding=True, return_tensors="pt"))
    assert [line.split(":")[0] for line in swapped] == ["input_ids"]


def test_collators_of_transformers_and_trl_are_compared() -> None:
    """Every one of them repeats itself, and says what its settings change."""
    trl = pytest.importorskip("trl.trainer.sft_trainer").DataCollatorForLanguageModeling
    rows, words = tokens(), tokenizer()
    listed = rows.map(lambda row: {"labels": row["input_ids"]})
    pairs: list[tuple[Dataset, Any, Any, list[str]]] = [
        (rows, DataCollatorWithPadding(words), DataCollatorWithPadding(words, pad_to_multiple_of=8), ["input_ids"]),
        (
            listed,
            DataCollatorForSeq2Seq(words),
            DataCollatorForSeq2Seq(words, label_pad_token_id=0),
            ["labels"],
        ),
        (
            rows.remove_columns("labels"),
            DataCollatorForLanguageModeling(words, mlm=False),
            DataCollatorForLanguageModeling(words, mlm=False, pad_to_multiple_of=8),
            ["input_ids", "labels"],
        ),
        (listed, trl(pad_token_id=0), trl(pad_token_id=1), ["input_ids"]),
        (
            listed,
            trl(pad_token_id=0, padding_free=True),
            trl(pad_token_id=0),
            ["position_ids", "attention_mask", "cu_seq_lens_q"],
        ),
    ]
    for dataset, first, second, columns in pairs:
        check_repeatable(collating(dataset, first), PROBE)
        assert changes(collating(dataset, first), collating(dataset, type(first)(**vars_of(first)))) == []
        said = {line.split(":")[0] for line in changes(collating(dataset, first), collating(dataset, second))}
        assert said >= set(columns), (type(first), said)


def vars_of(collator: Any) -> dict[str, Any]:
    return {name: getattr(collator, name) for name in type(collator).__dataclass_fields__}


def test_one_changed_row_of_a_flat_batch_is_seen() -> None:
    trl = pytest.importorskip("trl.trainer.sft_trainer").DataCollatorForLanguageModeling
    collator = trl(pad_token_id=0, padding_free=True)
    rows = [{"input_ids": [5 + i, 6, 7 + i]} for i in range(10)]
    other = [*rows[:9], {"input_ids": [14, 6, 17]}]
    assert changes(collating(rows, collator), collating(other, collator)) == [
        "input_ids: other values (torch.int64 of shape (1, 18))",
        "labels: other values (torch.int64 of shape (1, 18))",
    ]


def test_rows_that_are_collated_alone_have_a_line_for_each_column() -> None:
    def each(dataset: Dataset, **more: Any) -> Collate:
        return lambda rows: {
            f"row {row}": {**tokenizer()(dataset[row]["text"], return_tensors="pt"), **more} for row in rows
        }

    every = "in the rows [0, 1, 2, 3, 5, 9] (in another order, or from another transform or collator?)"
    found = changes(each(texts()), each(texts().select(range(9, -1, -1)), more=torch.zeros(1, 2)))
    assert found == [  # rows 2 and 7 are alike in length, the others are not
        f"input_ids: other values {every}",
        *(f"{name}: other values in the rows [0, 1, 3, 5, 9]" for name in ("token_type_ids", "attention_mask")),
        f"more: saved no such column, given torch.float32 of shape (1, 2) {every}",
    ]


@pytest.fixture(scope="module")
def pixels() -> torch.Tensor:
    """Six normalized images of the usual size."""
    image = torch.rand(6, 3, 224, 224, generator=torch.Generator().manual_seed(0))
    return (image - 0.45) / 0.22


@pytest.mark.few(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_rounding_is_no_change(pixels: torch.Tensor, dtype: torch.dtype) -> None:
    """Errors of 1e-6 of every value, before the cast to the precision of the column."""
    for seed in range(5):
        noise = torch.randn(pixels.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        moved = (pixels.double() * (1 + 1e-6 * noise)).to(dtype)
        assert changes(of({"x": pixels.to(dtype)}), of({"x": moved})) == []
    shifted = (pixels.double() * (1 + 1e-6)).to(dtype)
    assert changes(of({"x": pixels.to(dtype)}), of({"x": shifted})) == []


@pytest.mark.parametrize("place", [0, 100, 223])
def test_a_thousandth_of_one_row_of_pixels_is_a_change(pixels: torch.Tensor, place: int) -> None:
    moved = pixels.clone()
    moved[4, :, place] *= 1.001
    (line,) = changes(of({"pixel_values": pixels}), of({"pixel_values": moved}))
    assert line.startswith("pixel_values: other values in the rows [5], by about ")
    estimate = float(line.split("about ")[1].split()[0])
    true = float((moved[4] - pixels[4]).norm() / pixels[4].norm())
    assert true / 3 < estimate < 3 * true
    one = pixels.clone()
    one[0, 1, 7, 7] += 0.5
    assert changes(of(pixels), of(one)) == [line for line in changes(of(pixels), of(one)) if "in the rows [0]" in line]
    assert changes(of(pixels), of(one))


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x.flip(-1),
        lambda x: x.flip(1),
        lambda x: -x,
        lambda x: x * 1.0001,
        lambda x: x + 0.001,
        lambda x: x.roll(1, -1),
        lambda x: x[[1, 0, 2, 3, 4, 5]],
    ],
)
def test_flips_shifts_and_scales_of_images_are_changes(pixels: torch.Tensor, change: Any) -> None:
    assert changes(of({"x": pixels}), of({"x": change(pixels)}))


def test_image_processors_are_compared() -> None:
    dataset = photos(lambda image: image)

    def processing(**options: Any) -> Collate:
        processor = ViTImageProcessor(size={"height": 32, "width": 32}, **options)
        return lambda rows: processor([dataset[row]["pixel_values"] for row in rows], return_tensors="pt")

    plain = processing()
    assert changes(plain, processing()) == []
    check_repeatable(plain, PROBE)
    for options in (
        {"resample": 3},
        {"do_normalize": False},
        {"image_mean": [0.5, 0.5, 0.501]},
        {"do_rescale": False},
    ):
        (line,) = changes(plain, processing(**options))
        assert line.startswith("pixel_values: other values in the rows [0, 1, 2, 3, 5, 9], by about "), (options, line)


def test_non_finite_and_huge_values_are_compared_where_they_are() -> None:
    base = torch.arange(24.0).reshape(6, 4)
    lowest = torch.finfo(torch.float32).min

    def at(place: tuple[int, int], value: float, other: float = 0.0) -> Collate:
        changed = base.clone()
        changed[place] = value
        changed[0, 1] += other
        return of({"x": changed})

    values = (1.0, float("nan"), float("inf"), -float("inf"), lowest, -lowest)
    for first in values:
        for second in values:
            said = changes(at((2, 1), first), at((2, 1), second))
            assert bool(said) == (repr(first) != repr(second)), (first, second, said)
        assert changes(at((2, 1), first), at((2, 2), first))
        assert changes(at((2, 1), first), at((2, 1), first, other=0.1)), "what is beside it is still compared"
    everywhere = of(torch.full((6, 4), float("nan")))
    assert changes(everywhere, everywhere) == []


@dataclass
class Both:
    tokens: torch.Tensor
    extra: dict[str, Any]


Named = namedtuple("Named", "a b")


class Opaque:
    def __init__(self, function: Callable[[], int]) -> None:
        self.function = function


def test_batches_of_every_form_have_their_columns_named() -> None:
    ones = torch.ones(6, 2)

    def paths(batch: Any) -> dict[str, Any]:
        return collation_of(of(batch), PROBE)["columns"]

    assert list(paths(ones)) == ["batch"]
    assert list(paths((ones, ones))) == ["0", "1"]
    assert list(paths(BatchEncoding({"input_ids": ones}))) == ["input_ids"]
    assert list(paths({"a": {"b": [ones, {"c": 1}]}, "d": None})) == ["a.b.0", "a.b.1.c", "d"]
    assert list(paths(Both(ones, {"x": [1, 2]}))) == ["tokens", "extra.x"]
    assert list(paths(Named(ones, "text"))) == ["0", "1"]
    assert list(paths([{"x": ones}, {"x": ones}])) == ["0.x", "1.x"]
    kinds = paths({"t": "text", "n": None, "f": 0.5, "l": [0.5] * 6, "o": Opaque(lambda: 1), "i": [1] * 6, "z": 1j})
    assert {name: column["type"] for name, column in kinds.items()} == {
        **{"t": "str", "n": "NoneType", "f": "float", "l": "list", "o": "test_collation.Opaque", "i": "list"},
        "z": "complex",
    }
    assert kinds["o"] == {"type": "test_collation.Opaque"}
    assert len(kinds["i"]["digests"]) == 6 and len(kinds["l"]["norms"]) == 6
    json.dumps(kinds, allow_nan=False)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (torch.ones(6, 2), torch.ones(6, 2, dtype=torch.float64)),
        (torch.ones(6, 2), torch.ones(6, 2).numpy()),
        (torch.ones(6, 2), torch.ones(6, 2, 1)),
        (torch.ones(6, 2, dtype=torch.int64), torch.ones(6, 2, dtype=torch.int32)),
        (torch.ones(6, 2, dtype=torch.bool), torch.zeros(6, 2, dtype=torch.bool)),
        (torch.ones(6, dtype=torch.uint8), torch.tensor([1, 1, 1, 1, 1, 2], dtype=torch.uint8)),
        (torch.ones(6, dtype=torch.complex64), 1j * torch.ones(6, dtype=torch.complex64)),
        (torch.eye(6), torch.eye(6).to_sparse() * 2),
        (np.array(["a"] * 6), np.array(["a"] * 5 + ["b"])),
        (["a"] * 6, ["a"] * 5 + ["b"]),
        ([0.5] * 6, [0.5] * 5 + [0.6]),
        ([[1], [2]], [[1], [3]]),
        ([[1], [2]], [[1], [2], [3]]),
        ("a", "b"),
        (1, True),
        (0.5, 0.6),
        (None, 0),
        ((torch.ones(6), 1), (torch.ones(6), 2)),
        (PILImage.new("L", (2, 2), 0), PILImage.new("L", (2, 2), 1)),
        (torch.zeros(6, 0), torch.zeros(6, 0, dtype=torch.int64)),
    ],
)
def test_changes_of_type_shape_and_value_are_seen(first: Any, second: Any) -> None:
    assert changes(of({"x": first}), of({"x": first})) == []
    assert len(changes(of({"x": first}), of({"x": second}))) == 1


def test_other_rows_and_columns_are_said() -> None:
    ones = torch.ones(3)
    assert collation_changes(collation_of(of(ones), [0, 1, 2]), collation_of(of(ones), [0, 1, 3])) == [
        "rows: saved [0, 1, 2], given [0, 1, 3]"
    ]
    assert changes(of({"a": ones}), of({"a": ones, "b": 1})) == ["b: saved no such column, given int"]


def vision() -> Any:
    return pytest.importorskip("torchvision.transforms.v2")


def random_cases() -> dict[str, Callable[[], Collate]]:
    def masked(**options: Any) -> Collate:
        offsets = {"return_offsets_mapping": True, "padding": "max_length", "max_length": 12}
        rows = tokens(**offsets if "whole_word_mask" in options else {}).remove_columns("labels")
        return collating(rows, DataCollatorForLanguageModeling(tokenizer(), **options))

    def transformed(*names: str) -> Collate:
        v2 = vision()
        made = {"crop": lambda: v2.RandomCrop(32), "flip": lambda: v2.RandomHorizontalFlip()}
        steps = v2.Compose(
            [*(made[name]() for name in names), v2.PILToTensor(), v2.ToDtype(torch.float32, scale=True)]
        )
        return collating(photos(steps))

    def drawing(draw: Callable[[], Any]) -> Collate:
        return lambda rows: {"x": torch.ones(len(rows)), "noise": draw()}

    return {
        "mlm": lambda: masked(mlm=True),
        "mlm with a generator of its own": lambda: masked(mlm=True, seed=3),
        "mlm of one token in 20": lambda: masked(mlm=True, mlm_probability=0.05),
        "whole words": lambda: masked(mlm=True, whole_word_mask=True, mask_replace_prob=1, random_replace_prob=0),
        "crop": lambda: transformed("crop"),
        "flip": lambda: transformed("flip"),
        "crop and flip": lambda: transformed("crop", "flip"),
        "torch": lambda: drawing(lambda: torch.rand(3)),
        "numpy": lambda: drawing(lambda: np.random.rand()),
        "numpy generator": lambda: drawing(np.random.default_rng(0).random),
        "python": lambda: drawing(lambda: [random.choice("abcdefgh") for _ in range(9)]),
        "length": lambda: drawing(lambda: [1] * random.randrange(9)),
        "small": lambda: drawing(lambda: 1 + 1e-7 * torch.rand(3, dtype=torch.float64)),
    }


@pytest.mark.parametrize("case", list(random_cases()))
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_random_rows_are_refused_and_generators_left_alone(case: str, seed: int) -> None:
    collate = random_cases()[case]()
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)
    expected = (torch.rand(2).tolist(), np.random.rand(), random.random())
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)
    with pytest.raises(ValueError, match=r"same seeds.*use the transform and the collator of the evaluation"):
        check_repeatable(collate, PROBE)
    collation_of(collate, PROBE)
    assert (torch.rand(2).tolist(), np.random.rand(), random.random()) == expected


def test_the_message_names_columns_and_rows() -> None:
    counter = iter(range(100))

    def collate(rows: list[int]) -> dict[str, Any]:
        mixed = torch.zeros(len(rows), 2)
        mixed[3] = next(counter)
        return {"input_ids": torch.ones(len(rows)), "labels": mixed}

    with pytest.raises(ValueError, match=r"in \['labels'\] of the rows \[3\], although the generators"):
        check_repeatable(collate, PROBE)


def test_rows_that_repeat_are_accepted() -> None:
    v2 = vision()
    steps = v2.Compose([v2.CenterCrop(32), v2.PILToTensor(), v2.ToDtype(torch.float32, scale=True)])
    check_repeatable(collating(photos(steps)), PROBE)
    words = tokenizer()
    dataset = tokens()
    check_repeatable(collating(dataset, DataCollatorWithPadding(words)), PROBE)
    opaque = [(torch.tensor([float("nan"), 1.0]), 3) for _ in range(10)]
    check_repeatable(collating(opaque, default_collate), PROBE)
    check_repeatable(lambda rows: {"x": torch.ones(2), "o": Opaque(lambda: 1), "s": {1, 2}}, PROBE)


def test_a_seed_that_the_collator_sets_itself_is_its_own_affair() -> None:
    """It gives the same rows each time, and the generator is as it was before."""

    def seeded(rows: list[int]) -> torch.Tensor:
        torch.manual_seed(7)
        return torch.rand(len(rows))

    before = torch.get_rng_state()
    check_repeatable(seeded, PROBE)
    assert torch.equal(torch.get_rng_state(), before)


def test_slow_rows_are_collated_four_times_and_quick_ones_more_often(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[list[int]] = []
    check_repeatable(lambda rows: calls.append(rows), [0])
    assert len(calls) > 4
    calls.clear()
    monkeypatch.setattr("hf_trak.identity.collation.SPARE_SECONDS", 0.0)
    check_repeatable(lambda rows: calls.append(rows), [4, 5])
    assert calls == [[4, 5]] * 4
