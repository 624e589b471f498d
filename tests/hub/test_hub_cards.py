"""Dataset cards: their content, the text of their authors that is kept, and text that is escaped."""

import re
from pathlib import Path

import pytest
from hub_server import TOKEN, Hub, client, hub
from huggingface_hub import DatasetCard
from test_hub_index import make_store

from hf_trak.hub import push_index
from hf_trak.hub.cards import TAGS, render_card, updated_card

__all__ = ["client", "hub"]  # fixtures

FACTS = {"subject": "one row per target", "columns": [["trak_scores", "scores"]], "facts": [["model", "me/model"]]}


def card(**facts: object) -> str:
    return render_card("scores", "Scores", "print()", {**FACTS, **facts}, {})


def section(text: str) -> str:
    (found,) = re.findall(r"<!-- hf_trak scores: begin.*?<!-- hf_trak scores: end -->", text, flags=re.DOTALL)
    return found


def test_new_card() -> None:
    made = DatasetCard(card())
    assert tuple(made.data.tags) == TAGS
    assert "| `trak_scores` | scores |" in made.text and "| model | me/model |" in made.text
    assert updated_card(None, card(), "scores") == card()


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_prose_and_metadata_are_kept(newline: str) -> None:
    """An update changes only the tags and the marked section."""
    lines = [
        "---",
        "license: mit",
        "tags:",
        "- mine",
        "custom: {a: 1}",
        "---",
        "# My words",
        "",
        "and <b>more</b>",
        "",
    ]
    existing = newline.join(lines)
    first = updated_card(existing, card(), "scores")
    assert first is not None
    read = DatasetCard(first)
    assert read.data.license == "mit" and read.data["custom"] == {"a": 1}
    assert read.data.tags == ["mine", *TAGS]
    assert newline.join(lines[6:9]) in read.text
    assert section(first).replace(newline, "\n") == section(card())
    edited = first.replace("# My words", "# My new words") + newline + "The end." + newline
    second = updated_card(edited, card(subject="something else"), "scores")
    assert second is not None and "# My new words" in second and "The end." in second
    assert "something else" in section(second) and "one row per target" not in second
    assert second.replace(section(second), "") == edited.replace(section(edited), "")
    assert updated_card(second, card(subject="something else"), "scores") == second


def test_card_without_metadata_gets_it() -> None:
    made = updated_card("Just words.\n", card(), "scores")
    assert made is not None and "Just words." in made and tuple(DatasetCard(made).data.tags) == TAGS


def test_two_sections_live_together() -> None:
    other = "<!-- hf_trak index: begin. x -->\nindex\n<!-- hf_trak index: end -->"
    made = updated_card(f"# Title\n\n{other}\n", card(), "scores")
    assert made is not None and other in made and section(made) == section(card())


@pytest.mark.parametrize(
    "existing",
    [
        "---\ntags: [a\n---\nwords",
        "---\n- a\n- list\n---\nwords",
        "---\ntags: 5\n---\nwords",
        "---\ntags: {a: b}\n---\nwords",
        "---\n1: a\n---\nwords",
        "---\na: &a [x]\nb: *a\n---\nwords",
        "---\ra: &a [x]\rb: *a\r---\rwords",
        "---\na: " + "[" * 40 + "]" * 40 + "\n---\nwords",
        "words " * 200_000,
        "words\n<!-- hf_trak scores: begin. x -->\nno end",
        "<!-- hf_trak scores: end -->\nwords\n<!-- hf_trak scores: begin. x -->",
        2 * "<!-- hf_trak scores: begin. x -->\n<!-- hf_trak scores: end -->\n",
    ],
)
def test_what_cannot_be_updated_safely_is_left_alone(existing: str) -> None:
    assert updated_card(existing, card(), "scores") is None


HOSTILE = "a|b`c`<!-- hf_trak scores: end --><script>alert(1)</script>\n---\nlicense: evil\n---\n# x {{ 7 * 7 }}\0"


def test_hostile_text_stays_text() -> None:
    """It cannot end the table, the section or the metadata, and a template in it is not evaluated."""
    made = card(subject=HOSTILE, facts=[[HOSTILE, HOSTILE]])
    assert "<script" not in made and "\0" not in made and "49" not in section(made)
    assert made.count("<!-- hf_trak scores: end -->") == 1
    assert DatasetCard(made).data.to_dict() == {"tags": list(TAGS)}
    (row,) = [line for line in made.splitlines() if line.startswith("| a")]
    assert row.count("|") == 3
    titled = render_card("scores", HOSTILE, "print()", FACTS, {"pretty_name": HOSTILE})
    assert DatasetCard(titled).data.to_dict() == {"tags": list(TAGS), "pretty_name": HOSTILE}


def test_push_keeps_the_card_of_the_repo(hub: Hub, client: Path, tmp_path: Path) -> None:
    """The README of another author is never overwritten, only added to; an unreadable one is not changed at all."""
    store = make_store(tmp_path / "store", ids=(0,))
    mine = "---\nlicense: mit\n---\n# Mine\n\nMy own words.\n"
    hub.put("dataset", "tester/index", {"README.md": mine.encode()})
    push_index(store, "tester/index", token=TOKEN, private=False)
    first = hub.dataset("tester/index")["README.md"].decode()
    assert (
        first.startswith("---\nlicense: mit\n") and "# Mine\n\nMy own words.\n" in first and "hf_trak index:" in first
    )
    edited = first.replace("My own words.", "My better words.")
    hub.put("dataset", "tester/index", {**hub.dataset("tester/index"), "README.md": edited.encode()})
    push_index(store, "tester/index", token=TOKEN, lds=0.321, private=False)
    second = hub.dataset("tester/index")["README.md"].decode()
    assert "My better words." in second and "0.321" in second and second.count("hf_trak index: begin") == 1
    for broken in (b"---\ntags: [a\n---\nwords", b"\xff\xfe not UTF-8"):
        hub.put("dataset", "tester/index", {**hub.dataset("tester/index"), "README.md": broken})
        push_index(store, "tester/index", token=TOKEN, lds=0.5, private=False)
        assert hub.dataset("tester/index")["README.md"] == broken
