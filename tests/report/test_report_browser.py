"""The report in a real browser: no requests, no foreign scripts, nothing cut off, readable on every screen."""

import itertools
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import browser
import numpy as np
import pytest
import torch
from browser import Page
from datasets import ClassLabel, Dataset, Features, Image
from PIL import Image as PILImage
from sklearn.datasets import load_digits
from test_report import HOSTILE, counted, with_scores

from hf_trak.report import AttributionRun, write_report

PHONE, DESKTOP = (390, 844), (1280, 1000)

# For every piece of visible text: its contrast with what lies behind it, and its size.
CONTRAST = """
(() => {
  const canvas = new OffscreenCanvas(1, 1).getContext("2d", {willReadFrequently: true});
  const rgba = (color) => {
    canvas.clearRect(0, 0, 1, 1); canvas.fillStyle = color; canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data];
  };
  const luminance = (color) => {
    const [r, g, b] = color.map((v) => (v /= 255) <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = (element) => {
    for (let e = element; e; e = e.parentElement) {
      const color = rgba(getComputedStyle(e).backgroundColor);
      if (color[3] > 250) return color;
    }
    return [255, 255, 255, 255];
  };
  const worst = {};
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const element = walker.currentNode.parentElement;
    if (!walker.currentNode.data.trim() || ["SCRIPT", "STYLE"].includes(element.tagName)) continue;
    const style = getComputedStyle(element);
    const [a, b] = [luminance(rgba(style.color)), luminance(behind(element))].sort((x, y) => y - x);
    const key = element.className?.baseVal ?? (element.className || element.tagName);
    worst[key] = Math.min(worst[key] ?? 99, (a + 0.05) / (b + 0.05));
  }
  return worst;
})()
"""


@pytest.fixture(scope="module")
def page() -> Iterator[Page]:
    if browser.executable() is None:
        pytest.skip("no Chromium: `python tests/kit/browser.py --install` installs the distribution's")
    with browser.chromium() as found:
        yield found


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two reports: one of digits with predictions, and one of hostile texts."""
    torch.manual_seed(0)
    directory = tmp_path_factory.mktemp("reports")
    train, targets, similar = digit_rows(300, 8)
    wrong = [(label + (i % 4 == 1)) % 10 for i, label in enumerate(targets["label"][:])]
    targets = targets.add_column("label_predicted", wrong).cast_column("label_predicted", train.features["label"])
    influence = np.linspace(0, 1, 300, dtype=np.float32)
    facts = {"model": "digits", "checkpoints": ["checkpoint-1"], "task": "image_classification"}
    pictures = AttributionRun(with_scores(targets, similar), train, None, influence, counted(similar), facts)

    scores = torch.randn(27, 9)
    rows = Dataset.from_dict({"text": HOSTILE * 3, "label": [f"<i>{text[:30]}" for text in HOSTILE * 3]})
    spans = [[{"start": 1, "stop": 5, "score": 1.0}]] * 9
    hostile = with_scores(rows.select(range(9)).add_column("trak_spans", spans), scores)
    facts = {"model": HOSTILE[0], HOSTILE[1]: HOSTILE[2]}
    texts = AttributionRun(hostile, rows, None, np.arange(27, dtype=np.float32), counted(scores), facts)
    return {
        "pictures": write_report(pictures, directory / "pictures.html"),
        "texts": write_report(texts, directory / "texts.html"),
    }


def digit_rows(n: int, m: int) -> tuple[Dataset, Dataset, torch.Tensor]:
    """Make a run of training digits and target digits with made-up scores, high for similar digits."""
    data = load_digits()
    pixels, flat = (data.images * 255 / 16).round().astype(np.uint8), torch.tensor(data.data, dtype=torch.float32)
    features = Features({"image": Image(), "label": ClassLabel(names=[str(i) for i in range(10)])})

    def rows(chosen: Any) -> Dataset:
        images = [PILImage.fromarray(pixels[i]) for i in chosen]
        return Dataset.from_dict({"image": images, "label": data.target[chosen].tolist()}, features=features)

    first, second = np.arange(n) % 1400, 1400 + np.arange(m) % 390
    centred = flat - flat.mean(dim=0)
    return rows(first), rows(second), (centred[first] @ centred[second].T / 1e4) ** 3


def requests_beyond(page: Page, path: Path) -> list[str]:
    return [url for url in page.requests if not url.startswith("data:") and url != path.as_uri()]


@pytest.mark.few(2)
@pytest.mark.parametrize("name", ["pictures", "texts"])
@pytest.mark.parametrize("size", [PHONE, DESKTOP, (320, 640)])
def test_no_complaint_no_request_nothing_wider_than_the_screen(page, files, name, size, tmp_path):
    page.media()
    page.size(*size, mobile=size != DESKTOP)
    page.open(files[name])
    for _ in range(4):  # what is laid out late, too
        page.evaluate("scrollTo({top: document.body.scrollHeight, behavior: 'instant'})")
        page.screenshot(tmp_path / "shot.png")
    assert page.complaints == []
    assert requests_beyond(page, files[name]) == []
    assert page.evaluate("document.documentElement.scrollWidth") == size[0]
    cut = page.evaluate(
        "[...document.querySelectorAll('article *')].filter(e => e.getBoundingClientRect().right > innerWidth + 1)"
        ".filter(e => !e.closest('.hush')).map(e => e.outerHTML.slice(0, 80))"
    )
    assert cut == []


def test_hostile_text_is_shown_as_text(page, files):
    page.size(*DESKTOP)
    page.open(files["texts"])
    shown = page.evaluate("document.body.textContent")
    for text in HOSTILE[:6]:
        assert text in shown
    assert "null\\x00byte \\x1b[31m" in shown
    assert (
        page.evaluate("document.querySelectorAll('script, img, iframe, object, embed, link, [onerror]').length") == 1
    )
    assert page.evaluate("document.title").startswith("What taught <script>")
    assert page.evaluate("[...document.querySelectorAll('article mark')].map(e => e.textContent)")[0] == "scri"
    # Right-to-left text runs from right to left, and turns nothing around it.
    place = "[...document.querySelectorAll('article p[dir=auto]')].find(e => e.textContent.includes('\\u202e'))"
    assert page.evaluate(f"getComputedStyle({place}).unicodeBidi") == "isolate"
    assert page.complaints == []


def test_the_policy_stops_what_escaping_would_have_missed(page, files, tmp_path):
    """The Content-Security-Policy stops a script even if escaping fails, which is simulated here."""
    code = (
        "<script>document.title = 'owned'</script><img src='https://example.invalid/x.png' onerror='document.title=1'>"
    )
    broken = tmp_path / "broken.html"
    broken.write_text(files["pictures"].read_text().replace("<main>", f"<main>{code}"))
    page.open(broken)
    page.evaluate("new Promise(done => setTimeout(done, 200))")
    assert page.evaluate("document.title") == "What taught digits this?"
    assert page.evaluate("document.images[0].naturalWidth") == 0
    assert any("Content Security Policy" in text for text in page.complaints)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_contrast(page, files, scheme):
    """The contrast is at least 4.5 to 1 everywhere (WCAG 2.2, success criterion 1.4.3)."""
    page.size(*DESKTOP)
    page.media(prefers_color_scheme=scheme)
    for path in files.values():
        page.open(path)
        found = page.evaluate(CONTRAST)
        assert len(found) > 10
        assert {name: ratio for name, ratio in found.items() if ratio < 4.5} == {}
    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (background == "rgb(16, 20, 24)") == (scheme == "dark")


def test_names_headings_and_landmarks(page, files):
    page.media()
    page.size(*DESKTOP)
    page.open(files["pictures"])
    levels = page.evaluate("[...document.querySelectorAll('h1,h2,h3,h4')].map(e => +e.tagName[1])")
    assert levels[0] == 1 and levels.count(1) == 1
    assert all(after - before <= 1 for before, after in itertools.pairwise(levels))
    # The tree holds what is laid out; let that be everything.
    page.evaluate("document.querySelectorAll('article').forEach(e => { e.style.contentVisibility = 'visible' })")
    nodes = page.call("Accessibility.getFullAXTree")["nodes"]
    named = [(n["role"]["value"], n.get("name", {}).get("value", "")) for n in nodes if not n["ignored"]]
    images = [name for role, name in named if role in ("image", "img", "graphics-document")]
    assert len(images) >= 8 * 12 and all(images)
    assert sum(name.startswith("Target ") for name in images) == 8
    assert sum(name.startswith("Training row ") for name in images) >= 8 * 10
    assert {"main", "navigation", "banner", "contentinfo"} <= {role for role, _ in named}
    for role in ("searchbox", "checkbox", "link", "heading"):
        assert all(name for found, name in named if found == role)
    assert page.evaluate("document.documentElement.lang") == "en"


def test_filter_and_links_by_keyboard(page, files):
    page.size(*DESKTOP)
    page.open(files["pictures"])
    visible = "[...document.querySelectorAll('article')].filter(e => e.offsetParent !== null).length"
    focus = "document.activeElement.textContent.trim() || document.activeElement.id"
    order = []
    for _ in range(6):
        page.press("Tab")
        order.append(page.evaluate(focus))
    assert order == ["Skip to the targets", "Targets", "Training set", "Run", "find", "wrong"]
    outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
    assert outline == "solid"
    assert page.evaluate(visible) == 8
    page.evaluate("document.getElementById('wrong').click()")
    page.evaluate("document.getElementById('find').focus()")
    wait = "new Promise(done => setTimeout(done, 250))"
    page.evaluate(wait)
    assert page.evaluate(visible) == 2
    assert page.evaluate("document.getElementById('found').textContent") == "2 of 8 targets"
    page.type("row 5")
    page.evaluate(wait)
    assert page.evaluate(visible) == 1
    page.evaluate("location.hash = '#target-0'")  # a link to what is hidden shows it again
    page.evaluate(wait)
    assert page.evaluate(visible) == 8
    page.press("Enter")


def test_without_scripts_everything_is_there(page, files):
    page.call("Emulation.setScriptExecutionDisabled", value=True)
    try:
        page.open(files["pictures"])
        page.call("DOM.enable")
        root = page.call("DOM.getDocument", depth=1)["root"]["nodeId"]
        found = page.call("DOM.querySelectorAll", nodeId=root, selector="article.target")["nodeIds"]
        form = page.call("DOM.querySelector", nodeId=root, selector="form")["nodeId"]
        attributes = page.call("DOM.getAttributes", nodeId=form)["attributes"]
    finally:
        page.call("Emulation.setScriptExecutionDisabled", value=False)
    assert len(found) == 8
    assert "hidden" in attributes  # no control that would do nothing


def test_print_and_reduced_motion(page, files, tmp_path):
    page.size(*DESKTOP)
    page.open(files["pictures"])
    page.media(prefers_reduced_motion="reduce")
    assert page.evaluate("getComputedStyle(document.documentElement).scrollBehavior") == "auto"
    page.media("print", prefers_color_scheme="dark")
    assert page.evaluate("getComputedStyle(document.querySelector('nav')).display") == "none"
    assert page.evaluate("getComputedStyle(document.querySelector('article')).contentVisibility") == "visible"
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert {ratio for ratio in page.evaluate(CONTRAST).values() if ratio < 4.5} == set()
    page.media()
    assert page.pdf(tmp_path / "report.pdf").read_bytes().startswith(b"%PDF")


def test_one_target_in_a_frame_as_a_notebook_shows_it(page, files, tmp_path):
    from html import escape

    from hf_trak.report.notebook import TargetDisplay

    inner = files["texts"].read_text()
    frame = TargetDisplay(inner, "Target <b>0</b>")._repr_html_()
    assert escape("Target <b>0</b>") in frame
    notebook = tmp_path / "notebook.html"
    notebook.write_text(f"<!DOCTYPE html><title>notebook</title><style>p {{ color: red }}</style>{frame}")
    page.open(notebook)
    assert page.evaluate("document.querySelector('iframe').contentDocument") is None  # sandboxed: another origin
    assert requests_beyond(page, notebook) == [] or all(
        url == "about:srcdoc" for url in requests_beyond(page, notebook)
    )


@pytest.mark.slow
def test_a_thousand_targets_stay_usable(page, tmp_path):
    torch.manual_seed(0)
    train, targets, scores = digit_rows(1400, 1000)
    targets = targets.add_column("label_predicted", targets["label"][:]).cast_column(
        "label_predicted", train.features["label"]
    )
    run = AttributionRun(with_scores(targets, scores), train, None, None, counted(scores), {"model": "digits"})
    path = write_report(run, tmp_path / "thousand.html")
    page.media()
    page.size(*PHONE, mobile=True)
    seconds = page.open(path)
    print(f"1,000 targets: {path.stat().st_size / 1e6:.1f} MB, load event after {seconds:.1f} s")
    assert path.stat().st_size < 20e6
    assert page.evaluate("document.querySelectorAll('article').length") == 1000
    page.evaluate("document.getElementById('target-999').scrollIntoView({behavior: 'instant'})")
    top = page.evaluate("document.getElementById('target-999').getBoundingClientRect().top")
    assert 0 <= top < PHONE[1]
    # What is far from the screen is not laid out: that is what keeps a thousand of them usable.
    rendered = "document.querySelector('#target-500 .example').checkVisibility({contentVisibilityAuto: true})"
    assert page.evaluate(rendered) is False
    page.screenshot(tmp_path / "shot.png")
    assert page.complaints == []


@pytest.mark.slow
def test_a_picture_of_every_page_is_left_for_the_eye(page, files, tmp_path):
    """Save screenshots to the directory named by HF_TRAK_SCREENSHOTS, for people to look at."""
    import os

    directory = Path(os.environ.get("HF_TRAK_SCREENSHOTS", tmp_path))
    directory.mkdir(parents=True, exist_ok=True)
    for name, path in files.items():
        for kind, size, scheme in (("phone", PHONE, "dark"), ("desktop", DESKTOP, "light")):
            page.media(prefers_color_scheme=scheme)
            page.size(*size, mobile=kind == "phone")
            page.open(path)
            shot = page.screenshot(directory / f"{name}-{kind}-{scheme}.png")
            pixels = np.asarray(PILImage.open(shot).convert("RGB")).reshape(-1, 3)
            assert len(np.unique(pixels[::101], axis=0)) > 30  # not blank


def test_the_browser_of_the_tests_can_be_installed(monkeypatch):
    monkeypatch.setenv("HF_TRAK_CHROMIUM", "/somewhere/chromium")
    assert browser.install() == "/somewhere/chromium"
    monkeypatch.delenv("HF_TRAK_CHROMIUM")
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert browser.install() is None
    with pytest.raises(FileNotFoundError, match="--install"), browser.chromium():
        pass
