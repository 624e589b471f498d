"""The viewer without its page: questions, filters, groups, exports, hostile texts and uploads."""

import csv
import io
import json
import pickle
import re
import time
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from datasets import Audio, Dataset, Features, Image, Value
from digit_models import digits, make, trained_net
from patience import patient
from PIL import Image as PILImage
from viewer_runs import BAD, N, hostile_run, image_index, language_index, picture

from hf_trak.cli.main import main
from hf_trak.cli.serve import opened
from hf_trak.report.run import AttributionRun
from hf_trak.viewer import IndexSession, Question, RunSession, TargetForm
from hf_trak.viewer.handlers import BY_INFLUENCE, BY_NUMBER, Handlers, Listing, message_of
from hf_trak.viewer.page import RowReader, answer_page, facts_page, frame, groups_page
from hf_trak.viewer.session import Answer
from hf_trak.viewer.train_rows import RowFilter, TrainRows

TARGET = {"text": "good fox sleeps in the film barn"}


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> IndexSession:
    directory = language_index(tmp_path_factory.mktemp("viewer"))
    found = opened(["--index", str(directory)])[0]
    assert isinstance(found, IndexSession)
    return found


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> IndexSession:
    found = opened(["--index", str(image_index(tmp_path_factory.mktemp("viewer")))])[0]
    assert isinstance(found, IndexSession)
    return found


def files_below(directory: str | Path) -> set[str]:
    return {str(path) for path in Path(directory).rglob("*") if path.is_file()}


# -- questions -------------------------------------------------------------------------------------------------------


def test_an_answer_is_that_of_attribute_and_leaves_no_file(session: IndexSession) -> None:
    attributor = session.attributor
    before = files_below(attributor.args.output_dir)
    found = session.ask(Question(TARGET))
    assert files_below(attributor.args.output_dir) == before
    rows = session._prepare(session.form.row(TARGET))
    expected = attributor.attribute(rows, top_k=None, method="index")[0]["trak_scores"]
    assert np.allclose(found.scores, expected, rtol=1e-4, atol=1e-5 * np.abs(expected).max())
    assert found.whole and len(found.rows) == N
    helped, harmed = found.ends(5, None)
    order = np.argsort(expected)
    assert helped == order[::-1][:5].tolist() and harmed == order[:5].tolist()


@pytest.mark.slow
def test_the_prediction_is_that_of_the_checkpoint_that_is_asked(tmp_path: Path) -> None:
    """One checkpoint says 3 to everything, and the other one 7."""
    nets = [trained_net(digits(0, 40), steps=1) for _ in range(2)]
    for net, label in zip(nets, (3, 7), strict=True):
        net.head.weight.data.zero_()
        net.head.bias.data = 9 * torch.eye(10)[label]
    attributor = make(nets[1], tmp_path, digits(0, 40)).featurize([net.state_dict() for net in nets])
    form = TargetForm(("text",), label="labels", label_names=tuple("0123456789"))
    typed = digits(50, 51)
    session = IndexSession(attributor, form, prepare=lambda rows: typed)
    for ids, said in (([0], "3"), ([1], "7"), (None, "7"), ([1, 0], "7")):
        assert session.ask(Question({"text": "typed"}, model_ids=ids)).target.prediction == said


def test_tokens_add_up_and_are_cut_from_the_text(session: IndexSession) -> None:
    found = session.ask(Question(TARGET, tokens=True))
    assert found.tokens is not None
    assert np.allclose(found.tokens.scores.sum(axis=1), found.scores, atol=1e-4 * np.abs(found.scores).max())
    tokens = found.shares(found.ends(3, None)[0], session.tokenizer)
    assert "".join(token.text for token in tokens) == TARGET["text"]
    shares = [token.share for token in tokens if token.share is not None]
    assert max(map(abs, shares)) == pytest.approx(1) and tokens[0].share is None, "nothing precedes the first token"


@pytest.mark.slow
def test_another_ridge_and_checkpoint_count_and_factors_are_kept(session: IndexSession) -> None:
    plain, other = session.ask(Question(TARGET)), session.ask(Question(TARGET, lambda_relative=10.0))
    assert not np.allclose(plain.scores, other.scores, rtol=0.1)
    kept = session._solver.cache_info().currsize
    session.ask(Question({"text": "bad fox sleeps in the barn"}, lambda_relative=10.0))
    assert session._solver.cache_info().currsize == kept
    for number in range(8):
        session.ask(Question(TARGET, lambda_relative=1.0 + number))
    assert session._solver.cache_info().currsize == 4
    with pytest.raises(ValueError, match="The checkpoints are \\[7\\]"):
        session.ask(Question(TARGET, model_ids=[7]))


def test_what_the_model_writes_next_is_shown_and_attributed(session: IndexSession) -> None:
    found = session.ask(Question(TARGET, predicted=True, tokens=True))
    assert [column for column, _ in found.target.texts] == ["text", "the model’s answer"]
    assert not np.allclose(found.scores, session.ask(Question(TARGET)).scores, rtol=0.1)
    with pytest.raises(ValueError, match="The target has 32 tokens, and the model takes 32"):
        session.ask(Question({"text": "fox " * 40}, predicted=True))


def test_what_cannot_be_asked_is_said(session: IndexSession) -> None:
    for texts, message in (({"text": " "}, "Nothing is typed"), ({"text": "a" * 100_001}, "100,001 characters")):
        with pytest.raises(ValueError, match=message):
            session.ask(Question(texts))
    assert not session.reranks
    with pytest.raises(ValueError, match="no fitted curvature"):
        session.ask(Question(TARGET, rerank=5))


@pytest.mark.slow
def test_reranked_answers_have_exact_scores_and_ranks(tmp_path: Path) -> None:
    directory = str(language_index(tmp_path))
    options = ("--curvature", "ekfac", "--curvature_rows", "20", "--json")
    assert main(["curvature", "--output_dir", directory, *options]) == 0
    session = opened(["--index", directory])[0]
    assert isinstance(session, IndexSession) and session.reranks
    found = session.ask(Question(TARGET, rerank=5, lambda_relative=0.5))
    assert found.stage == "exact" and not found.whole and set(found.ranks) == set(found.rows.tolist())
    rows = session._prepare(session.form.row(TARGET))
    exact = np.array(session.attributor.attribute(rows, top_k=None, method="exact")[0]["trak_scores"])
    assert np.allclose(found.scores, exact[found.rows], rtol=1e-3, atol=1e-5 * np.abs(exact).max())
    assert session.attributor.args.lambda_relative != 0.5, "another λ counts for one question"
    document = answer_page(session, found, 3)[0]
    assert "exact scores" in document and "index rank" in document
    assert "rows of the shortlist have exact scores" in document


def test_uploaded_images_are_predicted_or_labelled(images: IndexSession) -> None:
    assert images.form == TargetForm((), "image", "image", "label", ("dark", "light"))
    data = png(picture(150, 77))
    predicted = images.ask(Question(upload=data))
    assert predicted.target.prediction in ("dark", "light") and predicted.target.label is None
    same = images.ask(Question(upload=data, label=predicted.target.prediction))
    assert np.allclose(predicted.scores, same.scores, rtol=1e-4, atol=1e-6 * np.abs(same.scores).max())
    assert len(images.rows.matching(RowFilter("a"))) == 0, "there is no text to search"
    html, shown = answer_page(images, same, 3, RowFilter(label="dark"))
    assert {images.rows.content(int(same.rows[place])).label for place in (*shown.helped, *shown.harmed)} == {"dark"}
    assert html.count('class="picture"') == 1 + len(shown.helped) + len(shown.harmed)
    with pytest.raises(ValueError, match="The label is 'grey'"):
        images.ask(Question(upload=data, label="grey"))


@pytest.mark.parametrize(
    "data", [b"", b"GIF89a", pickle.dumps({"a": 1}), b"<svg onload=alert(1)>", b"\0" * 11_000_000]
)
def test_uploads_that_are_no_images_are_refused(images: IndexSession, data: bytes) -> None:
    with pytest.raises(
        ValueError, match=r"cannot be read as an image|No image is uploaded|Expected at most 10,485,760"
    ):
        images.form.row({}, data)


def test_a_picture_of_very_many_pixels_is_refused(images: IndexSession) -> None:
    data = png(PILImage.new("1", (20_000, 20_000)))
    assert len(data) < 100_000
    with pytest.raises(ValueError, match="cannot be read as an image"):
        images.form.row({}, data)


def png(image: PILImage.Image) -> bytes:
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def test_rows_as_json() -> None:
    form = TargetForm.find(
        "causal_lm", Features({"messages": [{"role": Value("string"), "content": Value("string")}]})
    )
    assert form.as_json
    row = {"messages": [{"role": "user", "content": "Hi"}]}
    assert form.row({"json": json.dumps(row)})[0] == row
    for text in ("", "[1]", "{}", '{"a": ', "[" * 100_000, '{"a": [1, "b"]}'):
        with pytest.raises(ValueError, match="Correct it"):
            form.row({"json": text})


def test_a_typed_row_has_the_columns_of_training_rows() -> None:
    known = Features({"messages": [{"role": Value("string"), "content": Value("string")}]})
    form = TargetForm.find("causal_lm", known)
    for name in ("position_ids", "inputs_embeds", "input_ids"):
        with pytest.raises(ValueError, match=f"1 columns that the training rows lack, such as '{name}'"):
            form.row({"json": json.dumps({"messages": [{"role": "user", "content": "Hi"}], name: [0]})})
    for one in (form, TargetForm()):  # with and without known training rows
        started = time.monotonic()
        with pytest.raises(ValueError, match="7,000 columns that the training rows lack"):
            one.row({"json": json.dumps({f"a{number}": 0 for number in range(7000)})})
        assert time.monotonic() - started < patient(0.5)
    with pytest.raises(ValueError, match=r"has the fields \['a0'"):
        TargetForm(("text",)).row({f"a{number}": "b" for number in range(7000)})


@pytest.mark.parametrize(
    "column, values, said",
    [
        ("input_ids", [3, -1], "-1 in 'input_ids'"),
        ("input_ids", [3, 30], "30 in 'input_ids'"),
        ("labels", [-5, 3], "-5 in 'labels'"),
        ("labels", [3, 2**40], "1099511627776 in 'labels'"),
        ("attention_mask", [1, 7], "7 in 'attention_mask'"),
        ("position_ids", [0, 32], "32 in 'position_ids'"),
    ],
)
def test_numbers_outside_of_a_models_tables_are_refused(
    session: IndexSession, column: str, values: list[int], said: str
) -> None:
    """On a GPU one such number ends the process for everyone."""
    columns = ("input_ids", "labels", "attention_mask", "position_ids")
    asking = IndexSession(session.attributor, TargetForm(columns=columns))
    row = {"input_ids": [3, 4], "labels": [-100, 4], "attention_mask": [1, 1], "position_ids": [0, 1]}
    assert asking.ask(Question({"json": json.dumps(row)})).whole
    with pytest.raises(ValueError, match=said):
        asking.ask(Question({"json": json.dumps({**row, column: values})}))


@pytest.mark.parametrize(
    "task, columns, expected",
    [
        ("causal_lm", {"prompt": "string", "completion": "string"}, ("prompt", "completion")),
        ("masked_lm", {"id": "string", "text": "string"}, ("text",)),
        ("text_classification", {"a": "string", "b": "string", "label": "int64"}, ("a", "b")),
        ("regression", {"text": "string", "label": "float32"}, ("text",)),
        ("token_classification", {"text": "string"}, ()),
        ("image_classification", {"text": "string"}, ()),
    ],
)
def test_fields_follow_from_task_and_columns(task: str, columns: dict[str, str], expected: tuple[str, ...]) -> None:
    form = TargetForm.find(task, Features({name: Value(kind) for name, kind in columns.items()}), {0: "no", 1: "yes"})
    assert form.texts == expected and form.as_json == (not expected)
    assert form.label_names == (("no", "yes") if task == "text_classification" else ())
    assert form.generates == (task == "causal_lm")


# -- rows, filters, groups -------------------------------------------------------------------------------------------


def test_search_takes_letters_and_no_patterns(session: IndexSession) -> None:
    rows = session.rows
    for text in ("FOX", "<script>", ".*", "${alert", "x\x00y", "(", "\\"):
        contents = [" ".join(value for _, value in rows.content(i).texts) for i in range(N)]
        expected = [i for i, content in enumerate(contents) if text.lower() in content.lower()]
        assert rows.matching(RowFilter(text)).tolist() == expected
    assert len(rows.matching(RowFilter("fox"))) == N and len(rows.matching(RowFilter(".*"))) == 0


def test_filters_choose_among_all_rows_and_not_among_those_shown(session: IndexSession) -> None:
    found = session.ask(Question(TARGET))
    matching = session.rows.matching(RowFilter("<script>"))
    _, shown = answer_page(session, found, N, RowFilter("<script>"))
    assert sorted(found.rows[[*shown.helped, *shown.harmed]].tolist()) == matching.tolist() != []


def test_groups_add_up_scores(session: IndexSession) -> None:
    found = session.ask(Question(TARGET))
    groups = {group.name: group for group in session.groups(found, "topic")}
    assert set(groups) == {"<b>a</b>", "<b>b</b>"}
    assert groups["<b>a</b>"].total == pytest.approx(float(found.scores[::2].astype(np.float64).sum()), rel=1e-5)
    assert groups["<b>a</b>"].rows == N // 2
    with pytest.raises(ValueError, match="Expected one whose values form groups"):
        session.groups(found, "input_ids")


def test_rows_are_listed_by_self_influence(session: IndexSession, tmp_path: Path) -> None:
    handlers = Handlers(session, tmp_path)
    assert "Rows 21 to 40 of 40" in unescape(handlers.rows(Listing(), BY_NUMBER, 2))
    values = session.self_influence()
    path = handlers.export_rows(Listing(), BY_INFLUENCE, 1, "json")
    written = json.loads(Path(path).read_text())
    assert [row["row"] for row in written] == np.argsort(-values, kind="stable")[:20].tolist()
    assert written[0]["self_influence"] == pytest.approx(float(values.max()))


def test_rows_that_are_not_at_hand_are_numbers(session: IndexSession) -> None:
    rows = TrainRows(None, N)
    assert not rows.at_hand and not rows.searchable and rows.labels() == rows.group_columns() == []
    assert RowReader(rows).row(3).texts == ()
    with pytest.raises(ValueError, match="cannot be searched"):
        rows.matching(RowFilter("a"))
    some = TrainRows(Dataset.from_dict({"text": ["a", "b"]}), N, np.array([2, 5]))
    assert [some.content(number).texts for number in (2, 5)] != [(), ()]
    assert some.content(3).texts == some.content(7).texts == ()


def test_the_example_of_a_target_is_a_short_row() -> None:
    rows = TrainRows(Dataset.from_dict({"text": ["", "w" * 301, "short", "b"], "topic": list("abcd")}), 4)
    assert rows.example(["text"]) == {"text": "short"} and rows.example(["text", "topic"])["topic"] == "c"
    assert rows.example(["other"]) == rows.example([]) == TrainRows(None, N).example(["text"]) == {}


# -- saved runs ------------------------------------------------------------------------------------------------------


def test_a_saved_run_shows_the_scores_that_it_keeps(tmp_path: Path) -> None:
    hostile_run().save(tmp_path / "run")
    session = opened(["--index", str(tmp_path / "run")])[0]
    assert isinstance(session, RunSession) and len(session) == len(BAD)
    row = AttributionRun.load(tmp_path / "run").scored[4]
    found = session.answer(4)
    assert not found.whole and "The run keeps 12 of" in found.note
    helped, _ = found.ends(3, None)
    assert found.rows[helped].tolist() == row["trak_indices"][:3]
    with pytest.raises(ValueError, match="The target is 99"):
        session.answer(99)
    handlers = Handlers(session, tmp_path)
    with pytest.raises(ValueError, match="without its model"):
        handlers.ask({})
    listed = unescape(handlers.rows(Listing(), BY_INFLUENCE, 1))
    assert f"row {3 * len(BAD) - 1}<" in unescape(listed)


# -- hostile texts ---------------------------------------------------------------------------------------------------


class Document(HTMLParser):
    """The elements of a document, and its text outside of the style."""

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: set[str] = set()
        self.attributes: list[tuple[str, str]] = []
        self.text, self._inside = "", ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._inside = tag
        self.elements.add(tag)
        self.attributes += [(name, value or "") for name, value in attrs]

    def handle_data(self, data: str) -> None:
        if self._inside != "style":
            self.text += data


ELEMENTS = {
    "b", "bdi", "body", "defs", "div", "figcaption", "figure", "h1", "h2", "head", "html", "image", "li", "main",
    "meta",
    "ol", "p", "path", "rect", "section", "span", "style", "svg", "table", "tbody", "td", "th", "thead", "title", "tr",
    "use",
}  # fmt: skip


def test_hostile_texts_stay_text() -> None:
    session = RunSession(hostile_run(), title=BAD[0])
    pages = [answer_page(session, session.answer(place), 12)[0] for place in range(len(BAD))]
    pages += [facts_page(session), groups_page(session, session.groups(session.answer(0), "label"), BAD[1], False)]
    for page in pages:
        document = Document(page)
        assert document.elements <= ELEMENTS
        assert not [name for name, _ in document.attributes if name.startswith("on")]
        assert all(value.startswith(("#", "data:")) for name, value in document.attributes if name in ("href", "src"))
        (policy,) = [value for name, value in document.attributes if "default-src" in value]
        assert policy.startswith("default-src 'none'; img-src data:")
        assert "\x00" not in page and "\x1b" not in page
    for text, page in zip(BAD, pages, strict=False):
        shown = Document(page).text
        if text.isprintable() and len(text) < 1000:
            assert text in shown
    assert "… 3,800 more characters" in pages[6]


def test_a_frame_holds_its_document_and_nothing_that_a_template_reads() -> None:
    document = answer_page(RunSession(hostile_run()), RunSession(hostile_run()).answer(9), 12)[0]
    framed = frame(document, "<b>")
    assert not set("${}`") & set(framed)
    (start,) = re.findall(r"<[a-z]+", framed)
    assert start == "<iframe" and framed.endswith("></iframe>")
    parsed = Document(framed)
    assert dict(parsed.attributes)["srcdoc"] == document
    assert dict(parsed.attributes)["sandbox"] == "allow-same-origin", "no script runs"


def test_messages_are_escaped() -> None:
    assert message_of(ValueError("<img src=x onerror=alert(1)>\x1b")) == "&lt;img src=x onerror=alert(1)&gt;\\x1b"


def test_files_outside_the_dataset_are_not_read(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    for place in ("secret.png", "data/mine.png"):
        picture(100, 0).save(tmp_path / place)
    (tmp_path / "data" / "link.png").symlink_to(tmp_path / "secret.png")
    names = ["secret.png", "data/../secret.png", "data/mine.png", "data/link.png"]
    table = Dataset.from_dict({"image": [{"path": str(tmp_path / name), "bytes": None} for name in names]})
    rows = table.cast_column("image", Image())
    reader = RowReader(TrainRows(rows, len(names)), [tmp_path / "data"])
    found = [reader.row(i) for i in range(len(names))]
    assert [row.picture is not None for row in found] == [False, False, True, False]
    assert "outside the dataset" in (found[0].unshown or "")
    assert RowReader(TrainRows(rows, len(names))).row(2).picture is None, "without a root none is read"


def test_sounds_are_shown_from_rows_alone(tmp_path: Path) -> None:
    wav = b"RIFF\x24\0\0\0WAVEfmt "
    sounds: list[dict[str, Any]] = [{"bytes": wav, "path": "a.wav"}, {"bytes": b"<svg>", "path": None}]
    sounds.append({"bytes": None, "path": "/etc/passwd"})
    rows = Dataset.from_dict({"audio": sounds, "text": ["a", "b", "c"]}).cast_column("audio", Audio(decode=False))
    found = [RowReader(TrainRows(rows, 3)).row(i) for i in range(3)]
    assert found[0].sound is not None and found[0].sound.startswith("data:audio/wav;base64,UklGR")
    assert [row.sound for row in found[1:]] == [None, None] and all(row.unshown for row in found[1:])


# -- exports ---------------------------------------------------------------------------------------------------------


def test_every_format_holds_what_is_shown(session: IndexSession, tmp_path: Path) -> None:
    handlers = Handlers(session, tmp_path)
    found = session.ask(Question(TARGET))
    listing = Listing(count=7)
    expected = handlers.answer_rows(found, listing)
    assert len(expected) == 14 and expected[0]["text.text"] == session.rows.content(expected[0]["row"]).texts[0][1]
    written = json.loads(Path(handlers.export_answer(found, listing, "json")).read_text())
    assert written == expected
    assert pq.read_table(handlers.export_answer(found, listing, "parquet")).to_pylist() == expected
    with open(handlers.export_answer(found, listing, "csv"), newline="") as file:
        rows = list(csv.DictReader(file))
    assert [float(row["score"]) for row in rows] == [row["score"] for row in expected]
    for form, answer in (("exe", found), ("csv", None)):
        with pytest.raises(ValueError, match=r"The format is|There is no answer yet"):
            handlers.export_answer(answer, listing, form)


def test_formulas_are_no_formulas_in_csv(tmp_path: Path) -> None:
    texts = ['=HYPERLINK("http://x")', "+1", "-1", "@a", "\ta", 'plain, "quoted"\nline']
    run = hostile_run()
    rows = Dataset.from_dict({"text": texts})
    session = RunSession(AttributionRun(run.scored, rows, None, np.arange(6, dtype=np.float32), None, run.facts))
    path = Handlers(session, tmp_path).export_rows(Listing(), BY_NUMBER, 1, "csv")
    with open(path, newline="") as file:
        found = [row["text.text"] for row in csv.DictReader(file)]
    assert found == [*(f"'{text}" for text in texts[:-1]), texts[-1]]


def test_controls_out_of_range_are_refused(session: IndexSession, tmp_path: Path) -> None:
    for values in ((0, "", None), (101, "", None), (5, "a" * 201, None)):
        with pytest.raises(ValueError, match="Expected"):
            Listing.of(*values)
    handlers = Handlers(session, tmp_path)
    for ridge in (-1, 0, float("nan"), 1e9):
        with pytest.raises(ValueError, match="λ is"):
            handlers.ask({"text.text": "a", "ridge": ridge})
    assert isinstance(handlers.ask({"text.text": "good fox sleeps", "ridge": "", "checkpoints": ["0"]}), Answer)
