"""The report: its contents, saving and loading of runs, and the escaping of texts from datasets."""

import base64
import hashlib
import json
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import ClassLabel, Dataset, Features, Image, List, Value, load_from_disk
from digit_models import digits as digit_rows
from digit_models import make, trained_net
from PIL import Image as PILImage
from sklearn.datasets import load_digits
from torch import Tensor, nn
from transformers.modeling_outputs import ImageClassifierOutput

from hf_trak import TrakAttributor, TrakConfig
from hf_trak.attributor import last_result
from hf_trak.errors import IncompleteStoreError, StoreError
from hf_trak.report import AttributionRun, ReportOptions, ScoreDistributions, show_target, write_report
from hf_trak.report.content import Columns, Piece, Span, content_of, pieces, stored, visible
from hf_trak.report.images import PictureBook
from hf_trak.report.run_record import find_run
from hf_trak.report.views import signed

HOSTILE = [
    "<script>alert(1)</script>",
    "\"'><img src=x onerror=alert(1)>",
    "</title></style><svg onload=alert(1)>",
    "{{ 7 * 7 }}{% raw %}",
    "javascript:alert(1)",
    "&lt;b&gt; &amp;amp; &#0;",
    "W" * 5000,
    "\u202eמִימִין לִשְׂמֹאל\u202c abc",
    "null\x00byte \x1b[31m \x85 \ufffe \ufdd0 end",
]


def top_k(scores: Tensor, k: int) -> dict[str, list]:
    """Make the top-k score columns of a matrix `(n_train, n_targets)`."""
    best, worst = (scores.argsort(dim=0, descending=down)[:k].T for down in (True, False))
    return {
        "trak_indices": best.tolist(),
        "trak_scores": scores.T.gather(1, best).tolist(),
        "trak_harmful_indices": worst.tolist(),
        "trak_harmful_scores": scores.T.gather(1, worst).tolist(),
    }


def with_scores(rows: Dataset, scores: Tensor, k: int = 6) -> Dataset:
    for name, column in top_k(scores, k).items():
        rows = rows.add_column(name, column)
    return rows


def counted(scores: Tensor) -> ScoreDistributions:
    low, high = scores.min(dim=0).values.numpy(), scores.max(dim=0).values.numpy()
    return ScoreDistributions.from_blocks([(0, len(scores), scores)], low, high)


@pytest.fixture
def hostile_run() -> AttributionRun:
    """A run of nine targets and 27 training rows with hostile texts, labels, columns and facts."""
    texts = HOSTILE * 3
    scores = torch.randn(27, 9)
    train = Dataset.from_dict({"<b>text</b>": texts, "note": texts[::-1], "label": [f"<i>{t[:30]}" for t in texts]})
    targets = train.select(range(9))
    return AttributionRun(
        with_scores(targets, scores), train, None, np.arange(27, dtype=np.float32), counted(scores),
        {"train_rows": 27, "model": HOSTILE[0], HOSTILE[1]: HOSTILE[2], "checkpoints": [HOSTILE[1]]},
    )  # fmt: skip


class Elements(HTMLParser):
    """Parses a page into its elements with their attributes, and its text outside style and script."""

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.code: dict[str, str] = {}
        self.text = ""
        self._inside = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._inside = tag

    def handle_data(self, data: str) -> None:
        if self._inside in ("script", "style"):
            self.code[self._inside] = self.code.get(self._inside, "") + data
            self._inside = ""
        else:
            self.text += data


# -- distributions ---------------------------------------------------------------------------------------------------


def test_distributions_count_every_score_once_and_keep_signs_apart():
    scores = torch.randn(1000, 3) ** 3
    scores[:, 1] = scores[:, 1].abs() + 1.0  # no negative ones
    scores[5, 2] = 0.0
    found = counted(scores)
    assert (found.counts.sum(axis=1) == 1000).all()
    for j in range(3):
        edges = (found.first[j] + np.arange(found.counts.shape[1] + 1)) * found.width[j]
        expected, _ = np.histogram(scores[:, j].double().numpy(), bins=edges)
        assert np.abs(expected - found.counts[j]).sum() <= 2  # a score on an edge may round to either side
        negative = found.counts[j][edges[1:] <= 1e-12].sum()
        assert negative == int((scores[:, j] < 0).sum())
    np.testing.assert_allclose(found.mean, scores.double().mean(dim=0).numpy(), rtol=1e-12)
    np.testing.assert_allclose(found.std, scores.double().std(dim=0, correction=0).numpy(), rtol=1e-9)
    np.testing.assert_allclose(found.positive, (scores > 0).double().mean(dim=0).numpy())


def test_distributions_do_not_depend_on_the_blocks():
    scores = torch.randn(101, 4)
    low, high = scores.min(dim=0).values.numpy(), scores.max(dim=0).values.numpy()
    blocks = [(a, min(a + 7, 101), scores[a : a + 7]) for a in range(0, 101, 7)]
    streamed = ScoreDistributions.from_blocks(blocks, low, high)
    np.testing.assert_array_equal(streamed.counts, counted(scores).counts)
    np.testing.assert_allclose(streamed.mean, counted(scores).mean, rtol=1e-9)


def test_equal_scores_are_one_bin_and_no_scores_an_error():
    assert (counted(torch.zeros(5, 1)).counts.max(), counted(torch.full((5, 1), -2.0)).counts.max()) == (5, 5)
    with pytest.raises(ValueError, match="no scores to count"):
        ScoreDistributions.from_blocks([], np.zeros(1), np.ones(1))


# -- text and images -------------------------------------------------------------------------------------------------


def test_text_is_cut_and_its_best_span_marked():
    assert pieces("abcdef", limit=4) == ([Piece("abcd")], 2)
    spans = [Span(0, 1, 0.1), Span(2, 4, 0.9), Span(4, 99, 5.0)]  # the last is not inside the text
    assert pieces("abcdef", spans) == ([Piece("ab"), Piece("cd", True), Piece("ef")], 0)
    long = "x" * 3000 + "HERE" + "y" * 3000
    cut, left_out = pieces(long, [Span(3000, 3004, 1.0)], limit=1200)
    assert [piece.text for piece in cut if piece.marked] == ["HERE"]
    assert sum(len(piece.text) for piece in cut) - len("…") == 1200
    assert left_out == len(long) - 1200


def test_what_html_cannot_hold_is_written_out():
    assert visible("a\x00b\x1bc\x85d\ud800e\ufffef\r\ng\th") == "a\\x00b\\x1bc\\x85d\\ud800e\\ufffef\ng\th"
    visible("".join(map(chr, range(0x110000)))).encode("utf-8")  # nothing is left that UTF-8 cannot hold


def test_numbers_are_short_and_have_real_minus_signs():
    assert [signed(v) for v in (0.12549, -3.2e-05, -0.0, 1234567.0, -12.0)] == [
        "+0.125", "−3.2e−5", "+0", "+1.23e6", "−12",
    ]  # fmt: skip


def test_token_scores_and_offsets_mark_the_token_that_most_of_the_score_belongs_to():
    row = {
        "text": "one two three", "offset_mapping": [[0, 3], [4, 7], [8, 13]], "trak_token_positions": [1, 2],
        "trak_token_scores": [[0.1, 0.4], [0.2, 0.5]],
    }  # fmt: skip
    content = content_of(row, Columns(texts=("text",)))
    cut, _ = pieces(content.texts[0][1], content.spans)
    assert [piece.text for piece in cut if piece.marked] == ["three"]


def test_columns_are_found_by_type_and_name():
    picture = PILImage.new("RGB", (4, 4))
    features = Features(
        {"img": Image(), "caption": Value("string"), "id": Value("string"), "fine": ClassLabel(names=["a", "b"])}
    )
    rows = Dataset.from_dict({"img": [picture], "caption": ["a cat"], "id": ["x1"], "fine": [1]}, features=features)
    found = Columns.find(rows)
    assert (found.image, found.texts, found.label, found.label_names) == ("img", ("caption",), "fine", ("a", "b"))
    content = content_of(rows[0], found)
    assert (content.label, content.texts) == ("b", (("caption", "a cat"),))
    pair = Dataset.from_dict({"premise": ["p"], "hypothesis": ["h"], "labels": [-1], "input_ids": [[1, 2]]})
    assert Columns.find(pair).texts == ("premise", "hypothesis")
    assert content_of(pair[0], Columns.find(pair, label_names=["x"])).label == "-1"
    turns = {"role": Value("string"), "content": List({"type": Value("string"), "text": Value("string")})}
    chat = [{"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]}]
    assert content_of(chat[0], Columns.find(chat)).texts == (("messages", "user: hi\nassistant: hello"),)
    asked = [{"type": "image", "text": None}, {"type": "text", "text": "what is this"}]
    shown = {"images": [[picture, picture], []], "prompt": [[{"role": "user", "content": asked}]] * 2}
    seen = Dataset.from_dict(shown, features=Features({"images": List(Image()), "prompt": List(turns)}))
    for read in (seen, stored(seen)):
        found = Columns.find(read)
        assert (found.image, found.texts) == ("images", ("prompt",))
        assert PictureBook().add(content_of(read[0], found).image).width == 4
        assert content_of(read[0], found).texts == (("prompt", "user: what is this"),)
        assert content_of(read[1], found).image is None
    numbers = [(torch.rand(1, 8, 8), torch.tensor(3))]
    assert content_of(numbers[0], Columns.find(numbers)).label == "3"
    assert Columns.find(numbers).image == "image"
    with pytest.raises(ValueError, match=r"no column \['nope'\]"):
        Columns.find(rows, text_columns=["nope"])


def test_equal_pictures_are_kept_once_and_large_ones_made_small():
    book = PictureBook()
    first = book.add(np.zeros((8, 8), dtype=np.uint8))
    assert book.add(torch.zeros(1, 8, 8), "large") is first  # equal content, small enough for both sizes
    rng = np.random.default_rng(0)
    large = PILImage.fromarray(rng.integers(0, 255, (700, 900, 3), dtype=np.uint8))
    small, target = book.add(large), book.add(large, "large")
    assert (small.width, target.width) == (128, 320)
    assert len(book.pictures) == 3
    assert base64.b64decode(first.uri.split(",")[1]).startswith(b"\x89PNG")


# -- runs on disk ----------------------------------------------------------------------------------------------------


def test_a_run_survives_the_disk_with_the_rows_it_needs(tmp_path, hostile_run):
    saved = AttributionRun.load(hostile_run.save(tmp_path / "run"))
    named = {i for row in hostile_run.scored for key in ("trak_indices", "trak_harmful_indices") for i in row[key]}
    assert set(saved.train_rows.tolist()) == named | {i for i, _ in hostile_run.outliers()}
    for index in saved.train_rows.tolist():
        assert saved.train_row(index) == hostile_run.train[index]
    assert saved.scored[:] == hostile_run.scored[:]
    assert saved.outliers() == hostile_run.outliers()
    assert saved.facts == hostile_run.facts
    np.testing.assert_array_equal(saved.distributions.counts, hostile_run.distributions.counts)
    first = write_report(hostile_run, tmp_path / "a.html").read_text()
    again = write_report(AttributionRun.load(saved.save(tmp_path / "run")), tmp_path / "b.html").read_text()
    assert again == first
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["run"]
    files = {path.name for path in (tmp_path / "run" / "run").iterdir()}
    assert files == {"run.json", "scored", "train", "statistics.safetensors"}
    assert load_from_disk(tmp_path / "run" / "run" / "scored")[:] == hostile_run.scored[:]


def test_a_training_row_that_the_run_lacks(tmp_path):
    scores = torch.randn(40, 2)
    rows = Dataset.from_dict({"text": [f"row {i}" for i in range(40)]})
    run = AttributionRun(with_scores(rows.select([0, 1]), scores), rows)
    saved = AttributionRun.load(run.save(tmp_path))
    absent = next(i for i in range(40) if i not in saved.train_rows)
    with pytest.raises(StoreError, match=rf"row {absent} is not among them"):
        saved.train_row(absent)
    whole = AttributionRun.load(tmp_path, train_dataset=rows)
    assert whole.train_row(absent) == {"text": f"row {absent}"}


def test_runs_that_cannot_be_read(tmp_path, hostile_run):
    hostile_run.save(tmp_path / "scores" / "mine")
    with pytest.raises(IncompleteStoreError, match=r"holds no run.*Name one of \['mine'\], which are beside it"):
        AttributionRun.load(tmp_path / "scores" / "targets")
    with pytest.raises(StoreError, match=r"mine is a directory. Expected the path of a file"):
        write_report(hostile_run, tmp_path / "scores" / "mine")
    shutil.rmtree(tmp_path / "scores")
    with pytest.raises(IncompleteStoreError, match="holds no run"):
        AttributionRun.load(tmp_path)
    store = tmp_path / "trak"
    hostile_run.save(store / "scores" / "one")
    assert find_run(store) == store / "scores" / "one"
    hostile_run.save(store / "scores" / "two")
    with pytest.raises(ValueError, match=r"several runs.*one.*two"):
        AttributionRun.load(store)
    two = store / "scores" / "two" / "run"
    assert find_run(two) == two.parent
    (two / "run.json").write_text('{"format_version": 99}')
    with pytest.raises(StoreError, match="format version 99"):
        AttributionRun.load(two)
    (two / "run.json").write_text("{")
    with pytest.raises(StoreError, match="is not valid JSON"):
        AttributionRun.load(two)
    (two / "run.json").unlink()
    with pytest.raises(IncompleteStoreError, match=r"run\.json is missing"):
        AttributionRun.load(two.parent)
    hostile_run.save(two.parent)
    (two / "statistics.safetensors").write_bytes(b"\xff" * 100)
    with pytest.raises(StoreError, match=r"statistics.safetensors is damaged"):
        AttributionRun.load(two)


def test_what_is_no_result_of_attribute():
    rows = Dataset.from_dict({"text": ["a", "b"]})
    with pytest.raises(ValueError, match="missing"):
        AttributionRun(rows, rows)
    with pytest.raises(ValueError, match=r"names the training row \d+; there are 2"):
        AttributionRun(with_scores(rows, torch.randn(30, 2)), rows).check_rows(2)


# -- the page --------------------------------------------------------------------------------------------------------


def test_hostile_text_is_text(tmp_path, hostile_run):
    page = write_report(hostile_run, tmp_path / "report.html", ReportOptions(title=HOSTILE[2])).read_text()
    found = Elements(page)
    allowed = {
        "html", "head", "meta", "title", "style", "body", "svg", "defs", "use", "rect", "path", "image", "a", "header",
        "h1", "h2", "h3", "h4", "p", "dl", "div", "dt", "dd", "ul", "ol", "li", "b", "bdi", "span", "nav", "main",
        "section", "article", "form", "label", "input", "output", "figure", "figcaption", "footer", "script", "mark",
    }  # fmt: skip
    assert {tag for tag, _ in found.tags} <= allowed
    names = {name for _, attributes in found.tags for name in attributes}
    assert not {name for name in names if name.startswith("on") or name in ("src", "style", "srcdoc", "action")}
    assert sum(tag == "script" for tag, _ in found.tags) == 1
    links = [attributes["href"] for _, attributes in found.tags if "href" in attributes]
    assert all(link.startswith(("#", "data:image/png;base64,", "data:image/webp;base64,")) for link in links)
    for text in HOSTILE[:6]:
        assert text in found.text
    assert "null\\x00byte \\x1b[31m" in found.text
    assert "W" * 1200 in found.text and "3,800 more characters" in found.text
    assert "{{ 7 * 7 }}{% raw %}" in found.text and "49" not in page.split("{{ 7 * 7 }}")[0][-20:]
    assert "\x00" not in page


def test_the_policy_allows_this_style_and_this_script_and_nothing_else(tmp_path, hostile_run):
    found = Elements(write_report(hostile_run, tmp_path / "report.html").read_text())
    (policy,) = [a["content"] for tag, a in found.tags if a.get("http-equiv") == "Content-Security-Policy"]
    rules = dict(rule.split(" ", 1) for rule in policy.split("; "))
    assert rules["default-src"] == rules["base-uri"] == rules["form-action"] == "'none'"
    assert rules["img-src"] == "data:"
    for kind in ("style", "script"):
        digest = base64.b64encode(hashlib.sha256(found.code[kind].encode()).digest()).decode()
        assert rules[f"{kind}-src"] == f"'sha256-{digest}'"
    assert "http" not in found.code["style"] and "@import" not in found.code["style"]


def test_the_page_names_rows_scores_labels_and_leaves_out_what_it_is_told(tmp_path):
    scores = torch.linspace(-1, 1, 20)[:, None] * torch.tensor([1.0, -2.0, 3.0])
    train = Dataset.from_dict({"text": [f"train text {i}." for i in range(20)], "label": ["even", "odd"] * 10})
    targets = Dataset.from_dict(
        {"text": ["zero", "one", "two"], "label": ["even", "odd", "even"], "label_predicted": ["even", "even", "even"]}
    )
    run = AttributionRun(with_scores(targets, scores), train, None, None, counted(scores))
    page = write_report(run, tmp_path / "report.html", ReportOptions(examples=2, max_targets=2)).read_text()
    text = " ".join(Elements(page).text.split())
    assert "1 more targets are in the run." in text
    first, second = page.split("<article")[1:3]
    assert re.findall(r"train text (\d+)\.</p>", first) == ["19", "18", "0", "1"]
    assert re.findall(r"train text (\d+)\.</p>", second) == ["0", "1", "19", "18"]
    assert "+1</b>" in first and "−1</b>" in first and "+2</b>" in second
    assert "data-wrong" in second and "data-wrong" not in first
    assert re.search(r"of the targets predicted right\s*50\.0%", text)
    assert "All 20 scores" in text
    assert "Training set" not in text  # no self-influence, no such section
    with pytest.raises(ValueError, match="`examples` is 0"):
        ReportOptions(examples=0)


# -- from an attributor ----------------------------------------------------------------------------------------------


class DigitNet(nn.Module):
    """A linear classifier that is called as models of transformers are."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(64, 10)

    def forward(self, pixel_values: Tensor, labels: Tensor | None = None) -> ImageClassifierOutput:
        return ImageClassifierOutput(logits=self.head(pixel_values.flatten(1)))


def digits(start: int, stop: int) -> Dataset:
    data = load_digits()
    return Dataset.from_dict({"pixel_values": data.images[start:stop] / 16.0, "labels": data.target[start:stop]})


@pytest.fixture(scope="module")
def attributor(tmp_path_factory: pytest.TempPathFactory) -> TrakAttributor:
    config = TrakConfig(
        output_dir=str(tmp_path_factory.mktemp("trak")), proj_dim=64, shard_size=16, use_cpu=True, budget="fast"
    )
    torch.manual_seed(0)
    found = TrakAttributor(DigitNet(), config, train_dataset=digits(0, 50), task="image_classification")
    return found.featurize()


def test_from_features_to_page(attributor: TrakAttributor, tmp_path: Path):
    rows = digits(100, 104)
    scored = attributor.attribute(rows, top_k=8, name="few")
    found = last_result(attributor).counted()
    influence = attributor.self_influence()
    run = AttributionRun.collect(
        attributor.features, scored, distributions=found, self_influence=influence, facts={"lds": 0.5}
    )
    full = AttributionRun.collect(attributor.features, attributor.attribute(rows, top_k=None, name="all"))
    matrix = torch.tensor(np.stack(attributor.attribute(rows, top_k=None).with_format("numpy")["trak_scores"][:])).T
    np.testing.assert_array_equal(found.counts, counted(matrix).counts)
    np.testing.assert_array_equal(full.distributions.counts, found.counts)
    for ours, theirs in zip(full.scored, scored, strict=True):
        assert ours["trak_indices"][:8] == theirs["trak_indices"]
        assert ours["trak_harmful_indices"][:8] == theirs["trak_harmful_indices"]
    saved = AttributionRun.load(run.save(tmp_path / "run"))
    page = write_report(saved, tmp_path / "report.html").read_text()
    assert page.count("<article") == 4
    assert [i for i, _ in saved.outliers()[:3]] == influence.argsort(descending=True, stable=True)[:3].tolist()
    text = Elements(page).text
    for fact in ("DigitNet", "650", "sjlt", "0.3 relative", "0.5"):
        assert fact in text
    with torch.no_grad():
        logits = attributor.model(rows.with_format("torch")["pixel_values"][:].float()).logits
    classes = logits.argmax(1).tolist()
    attributor.attribute(rows, top_k=8, name="few")
    judged = last_result(attributor).run(attributor.features)
    assert judged.scored["labels_predicted"][:] == classes != rows["labels"][:]
    right = np.mean(np.array(classes) == rows["labels"])
    assert f"{right:.1%}" in Elements(write_report(judged, tmp_path / "judged.html").read_text()).text
    json.loads((tmp_path / "run" / "run" / "run.json").read_text())


def test_rows_of_any_dataset_are_shown(attributor: TrakAttributor, tmp_path: Path):
    class Pairs:
        def __init__(self, rows: Dataset) -> None:
            self.rows = rows.with_format("torch")

        def __len__(self) -> int:
            return len(self.rows)

        def __getitem__(self, index: int) -> dict[str, Any]:
            return {**self.rows[index]}

    targets = Pairs(digits(100, 103))
    scored = attributor.attribute(targets, top_k=3)
    run = AttributionRun.collect(attributor.features, scored, targets)
    page = write_report(AttributionRun.load(run.save(tmp_path / "run")), tmp_path / "report.html").read_text()
    assert page.count('href="data:image/png') >= 3
    assert f"<bdi>{int(targets[0]['labels'])}</bdi>" in page


def test_classes_of_targets_with_a_transform(attributor: TrakAttributor, tmp_path: Path):
    """The targets of a result are as stored, and the model takes what the transform makes of them."""
    rows = digits(100, 104).rename_column("pixel_values", "grey")
    with torch.no_grad():
        pixels = rows.with_format("torch")["grey"][:].float()
        said = attributor.model(pixels).logits.argmax(1).tolist()
    drawn = rows.with_transform(lambda batch: {"pixel_values": batch["grey"], "labels": batch["labels"]})
    attributor.attribute(drawn, top_k=3)
    run = last_result(attributor).run(attributor.features)
    assert run.scored["labels_predicted"][:] == said
    attributor.report(tmp_path / "report.html")
    assert f"Target 1, label {rows[1]['labels']}, predicted {said[1]}" in repr(attributor.show(1))
    attributor.attribute(drawn, top_k=3, group_by="labels")
    attributor.report(tmp_path / "groups.html")
    assert "labels_predicted" not in last_result(attributor).run(attributor.features).scored.column_names


def test_the_checkpoint_that_is_asked_predicts(tmp_path: Path):
    """And not the weights that the model has now."""
    nets = [DigitNet(), DigitNet()]
    with torch.no_grad():
        nets[1].head.bias[3] += 1000
    config = TrakConfig(str(tmp_path), proj_dim=64, use_cpu=True, budget="fast")
    own = TrakAttributor(DigitNet(), config, train_dataset=digits(0, 30), task="image_classification")
    own.featurize([net.state_dict() for net in nets])
    rows = digits(100, 104)
    for asked in ([1], None, [0]):
        own.attribute(rows, top_k=3, checkpoints=asked)
        said = last_result(own).run(own.features).scored["labels_predicted"][:]
        assert (said == [3] * 4) == (asked != [0])
        assert f"predicted {said[0]}" in repr(own.show(0))


def test_show_shows_the_last_result(attributor: TrakAttributor, tmp_path: Path):
    fresh = TrakAttributor.from_pretrained(
        str(attributor.args.output_dir), attributor.model, use_cpu=True, task="image_classification"
    )
    with pytest.raises(ValueError, match="nothing to show yet"):
        fresh.show(0)
    rows = digits(100, 104)
    scored = fresh.attribute(rows, top_k=3, name="shown")
    fresh.attribute(rows, top_k=3, per="train")  # has no targets as rows
    page = fresh.show(1, examples=2).page  # without training rows at hand
    text = " ".join(Elements(page).text.split())
    assert [int(i) for i in re.findall(r"row (\d+)", text)] == [
        *scored[1]["trak_indices"][:2],
        *scored[1]["trak_harmful_indices"][:2],
    ]
    assert "All 50 scores" in text
    run = AttributionRun.collect(fresh.features, scored)
    saved = AttributionRun.load(run.save(tmp_path / "run"))
    assert saved.train is None and saved.n_train == 50
    assert write_report(saved, tmp_path / "report.html").read_text().count("<article") == 4


def test_one_target_in_a_notebook_stays_in_its_frame(attributor: TrakAttributor):
    rows = digits(100, 104).add_column("text", HOSTILE[:4])
    scored = attributor.attribute(rows, top_k=3)
    shown = show_target(attributor.features, scored, 2, distributions=last_result(attributor).counted())
    (frame,) = Elements(shown._repr_html_()).tags
    assert frame[0] == "iframe" and frame[1]["sandbox"] is None  # nothing is allowed
    inner = Elements(frame[1]["srcdoc"])
    assert not [tag for tag, _ in inner.tags if tag == "script"]
    assert HOSTILE[2] in inner.text and "Target 2" in inner.text and "All 50 scores" in inner.text
    assert f"row {scored[2]['trak_indices'][0]} (" in repr(shown) and "Training row" not in repr(shown)  # has no text
    with pytest.raises(ValueError, match=r"`target` is 4. Expected the number of one of 4 targets"):
        show_target(attributor.features, scored, 4)


def test_a_report_of_predicted_classes_names_them_and_judges_none(tmp_path: Path) -> None:
    named = ClassLabel(names=[f"digit {digit}" for digit in range(10)])
    train = digit_rows(0, 100).cast_column("labels", named)
    net = trained_net(train, steps=60)
    own = make(net, tmp_path, train, proj_dim=256).featurize()
    rows = digit_rows(1000, 1012)
    wrong = rows.remove_columns("labels").add_column("labels", [(label + 1) % 10 for label in rows["labels"]])
    said = own.predict(wrong)
    assert said.features["labels"].names == named.names
    scored = own.attribute(said, top_k=3)
    own.report(tmp_path / "page.html")
    text = " ".join(Elements((tmp_path / "page.html").read_text(encoding="utf-8")).text.split())
    classes = list(zip(said["labels"], scored["trak_indices"], scored["trak_scores"], strict=True))
    pairs = [
        label == train[row]["labels"]
        for label, rows, scores in classes
        for row, score in zip(rows, scores, strict=True)
        if score > 0
    ]
    assert f"of the most helpful rows share the target’s label{np.mean(pairs):.1%}" in text
    assert "predicted right" not in text and " wrong " not in text
    assert f"digit {said['labels'][0]}" in text


@pytest.mark.parametrize(
    ("labels", "said", "judged"),
    [
        (["a", "a"], ["b", "b"], True),
        (["a", "b"], ["a", "b"], False),
        ([0, 1], ["LABEL_0", "LABEL_1"], False),
        ([0, 1], ["good", "bad"], False),  # labels without names, which nothing compares
        ([0], ["1"], True),
    ],
)
def test_predictions_of_ones_own_are_judged(labels: list[Any], said: list[str], judged: bool) -> None:
    rows = Dataset.from_dict({"text": ["x"] * len(labels), "label": labels, "predicted": said})
    assert (Columns.find(stored(rows)).prediction is not None) == judged
