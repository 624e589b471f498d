"""The page of the viewer in a real browser: every view, hostile texts, errors, no requests elsewhere.

Needs Gradio, which `.ci/run` installs in a directory of its own, and Chromium.
"""

import base64
import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import browser
import pytest
from browser import Page
from viewer_runs import BAD, N, hostile_run, image_index, language_index, picture, review_index

pytest.importorskip("gradio")

from hf_trak.cli.serve import opened
from hf_trak.report.content import visible
from hf_trak.viewer import RunSession, serve
from hf_trak.viewer.server import AUTH
from hf_trak.viewer.session import Session

DESKTOP, PHONE = (1280, 900), (390, 844)
ANSWER, ROWS, GROUPS, ABOUT = (f"#{name}-view" for name in ("answer", "rows", "groups", "about"))


@pytest.fixture(scope="module")
def page() -> Iterator[Page]:
    if browser.executable() is None:
        pytest.skip("no Chromium: `python tests/kit/browser.py --install` installs the distribution's")
    with browser.chromium() as found:
        found.size(*DESKTOP)
        yield found


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of the page of an index of texts."""
    directory = language_index(tmp_path_factory.mktemp("texts"))
    with served(opened(["--index", str(directory), "--title", BAD[0]])[0]) as url:
        yield url


@pytest.fixture(scope="module")
def reviews(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of the page of a language model that has learned some reviews."""
    with served(opened(["--index", str(review_index(tmp_path_factory.mktemp("reviews")))])[0]) as url:
        yield url


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of the page of an index of pictures."""
    directory = image_index(tmp_path_factory.mktemp("pictures"))
    with served(opened(["--index", str(directory)])[0]) as url:
        yield url


@pytest.fixture(scope="module")
def run() -> Iterator[str]:
    """The address of the page of a saved run of hostile texts."""
    with served(RunSession(hostile_run())) as url:
        yield url


@contextmanager
def served(session: Session) -> Iterator[str]:
    app = serve(session, port=None, block=False)
    try:
        yield app.local_url
    finally:
        app.close(verbose=False)


def visit(page: Page, url: str) -> None:
    page.call("Page.navigate", url="about:blank")
    page.complaints.clear()
    page.requests.clear()
    page.call("Page.navigate", url=url)
    wait(page, "!!document.querySelector('#ask-button')")


def wait(page: Page, expression: str, seconds: float = 60.0) -> Any:
    """Wait until a JavaScript expression is true, and return its value."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if found := page.evaluate(expression):
            return found
        time.sleep(0.1)
    raise TimeoutError(f"{expression} has not come true. The page shows: {page.evaluate('document.body.innerText')}")


def put(page: Page, field: str, text: str) -> None:
    """Replace what stands in a field, as a user does."""
    chosen = f"document.querySelector('{field} textarea, {field} input')"
    page.evaluate(f"{chosen}.focus(), {chosen}.select()")
    page.type(text)


def click(page: Page, element: str) -> None:
    page.evaluate(f"document.querySelector('{element}').click()")


def tab(page: Page, name: str) -> None:
    page.evaluate(
        f"[...document.querySelectorAll('button[role=tab]')].find(e => e.textContent.trim() == '{name}').click()"
    )


def shown(page: Page, view: str, holds: str) -> str:
    """Wait until the frame of a view shows a text, and return all of its text."""
    text = f"document.querySelector('{view} iframe')?.contentDocument?.body?.textContent"
    wait(page, f"({text} ?? '').includes({json.dumps(holds)})")
    return page.evaluate(text)


def elsewhere(page: Page, url: str) -> list[str]:
    return [one for one in page.requests if not one.startswith((url, "data:", "blob:", "about:"))]


def nothing_happened(page: Page, url: str) -> None:
    """No script of a text ran, nothing was asked for elsewhere, and no policy was violated."""
    assert elsewhere(page, url) == []
    assert [one for one in page.complaints if "exception" in one or "Content Security" in one] == []
    found = page.evaluate(
        "[...document.querySelectorAll('iframe')].map(e => [e.getAttribute('sandbox'), "
        "e.contentDocument.querySelectorAll('script, img, iframe, a, [onerror], [onload]').length])"
    )
    assert found and all(entry == ["allow-same-origin", 0] for entry in found)


def test_a_typed_target_is_answered_filtered_grouped_and_exported(page: Page, texts: str) -> None:
    visit(page, texts)
    assert page.evaluate("document.querySelector('h1').textContent") == BAD[0]
    put(page, "#field-0", "good fox sleeps in the film barn")
    page.press("Tab")
    click(page, "#ask-button")
    text = shown(page, ANSWER, "Helped most")
    assert f"{N} training rows; scores of the index." in text
    marked = page.evaluate(
        f"document.querySelector('{ANSWER} iframe').contentDocument.querySelectorAll('.tokens [class]').length"
    )
    assert marked > 0

    put(page, "#answer-search", "<script>")
    page.evaluate("document.querySelector('#answer-search input, #answer-search textarea').focus()")
    page.press("Enter")
    text = shown(page, ANSWER, "rows match the filter")
    items = page.evaluate(
        f"[...document.querySelector('{ANSWER} iframe').contentDocument.querySelectorAll('li .text')]"
        ".map(e => e.textContent)"
    )
    assert items and sum("<script>alert(1)</script>" in one for one in items) == len(items) / 2  # text and topic

    click(page, "#answer-export")
    link = wait(page, "document.querySelector('#answer-file a[download], #answer-file a[href*=file]')?.href")
    with urllib.request.urlopen(link) as answer:
        exported = answer.read().decode().splitlines()
    assert exported[0].startswith("end,rank,row,score") and any("<script>alert(1)" in line for line in exported)

    tab(page, "Groups")
    wait(page, "!!document.querySelector('#groups-button')?.offsetHeight")
    click(page, "#groups-button")
    assert "<b>a</b>" in shown(page, GROUPS, "added up")
    tab(page, "About")
    assert "GPT2LMHeadModel" in shown(page, ABOUT, "Training rows")
    nothing_happened(page, texts)


@pytest.mark.parametrize("size", [DESKTOP, PHONE], ids=["desktop", "phone"])
def test_one_word_of_a_target_has_rows_of_its_own(page: Page, texts: str, size: tuple[int, int]) -> None:
    frame = f"document.querySelector('{ANSWER} iframe').contentDocument"

    def asked(words: str) -> tuple[list[str], list[str]]:
        """The tokens that have a share, and the scores of the rows."""
        put(page, "#words", words)
        page.press("Tab")
        page.evaluate(f"document.querySelector('{ANSWER} iframe')?.remove()")
        click(page, "#ask-button")
        shown(page, ANSWER, "Helped most")
        marked = f"[...{frame}.querySelectorAll('.tokens [class]')].map(e => e.textContent.trim())"
        return page.evaluate(marked), page.evaluate(f"[...{frame}.querySelectorAll('.score')].map(e => e.textContent)")

    page.size(*size, mobile=size is PHONE)
    try:
        visit(page, texts)
        put(page, "#field-0", "good fox sleeps in the film barn")
        tokens, whole = asked("")
        assert len(tokens) > 3
        tokens, scores = asked("sleeps")
        assert tokens == ["sleeps"] and len(scores) == len(whole) and scores != whole
        assert page.evaluate("document.documentElement.scrollWidth") == size[0]
        put(page, "#words", "wakes")
        page.press("Tab")
        click(page, "#ask-button")
        message = wait(page, "document.querySelector('.toast-body, [data-testid=toast-body]')?.innerText")
        assert "'wakes'" in message and "Traceback" not in message
    finally:
        page.size(*DESKTOP)
    nothing_happened(page, texts)


def test_rows_are_listed_by_self_influence(page: Page, texts: str) -> None:
    visit(page, texts)
    tab(page, "Rows")
    wait(page, "!!document.querySelector('#rows-button')?.offsetHeight")
    page.evaluate("document.querySelectorAll('#rows-order input')[1].click()")
    click(page, "#rows-button")
    shown(page, ROWS, f"Rows 1 to 20 of {N} that match.")
    values = page.evaluate(
        f"[...document.querySelector('{ROWS} iframe').contentDocument.querySelectorAll('.score')]"
        ".map(e => parseFloat(e.textContent.replace('−', '-')))"
    )
    assert len(values) == 20 and values == sorted(values, reverse=True)
    frame = f"document.querySelector('{ROWS} iframe')"
    wait(page, f"{frame}.clientHeight >= {frame}.contentDocument.body.scrollHeight")
    nothing_happened(page, texts)


def test_errors_are_messages_without_traces(page: Page, texts: str, capfd: pytest.CaptureFixture[str]) -> None:
    visit(page, texts)
    assert page.evaluate("document.querySelector('#field-0 textarea').value"), "an example target"
    click(page, "#ask-button")
    shown(page, ANSWER, "Helped most")
    put(page, "#field-0", "")
    page.press("Tab")
    click(page, "#ask-button")
    message = wait(page, "document.querySelector('.toast-body, [data-testid=toast-body]')?.innerText")
    assert "Nothing is typed in ['text']" in message and "Traceback" not in message
    assert "Traceback" not in capfd.readouterr().err
    assert "Traceback" not in page.evaluate("document.body.innerText")
    assert "Helped most" in shown(page, ANSWER, "Helped most"), "the answer before stays"


def test_an_uploaded_picture_is_answered(page: Page, pictures: str, tmp_path: Path) -> None:
    visit(page, pictures)
    picture(150, 5).save(tmp_path / "mine.png")
    document = page.call("DOM.getDocument")["root"]["nodeId"]
    node = page.call("DOM.querySelector", nodeId=document, selector="#upload input[type=file]")["nodeId"]
    page.call("DOM.setFileInputFiles", files=[str(tmp_path / "mine.png")], nodeId=node)
    wait(page, "document.querySelector('#upload')?.innerText.includes('mine')")
    click(page, "#ask-button")
    assert "Predicted: " in shown(page, ANSWER, "Helped most")
    drawn = page.evaluate(
        f"document.querySelector('{ANSWER} iframe').contentDocument.querySelectorAll('svg.picture').length"
    )
    assert drawn > 3
    nothing_happened(page, pictures)


def test_hostile_targets_of_a_saved_run_stay_text(page: Page, run: str) -> None:
    visit(page, run)
    for place, text in enumerate(BAD):
        put(page, "#target", str(place))
        page.press("Tab")
        click(page, "#ask-button")
        target = f"document.querySelector('{ANSWER} iframe')?.contentDocument?.querySelector('.words .text')"
        wait(page, f"({target}?.textContent ?? '').startsWith({json.dumps(visible(text)[:30])})")
        width = page.evaluate(
            f"(d => [d.scrollWidth, d.clientWidth])(document.querySelector('{ANSWER} iframe')"
            ".contentDocument.documentElement)"
        )
        assert width[0] <= width[1], "nothing is wider than the page"
    nothing_happened(page, run)


def test_the_page_fits_a_phone(page: Page, run: str) -> None:
    page.size(*PHONE, mobile=True)
    try:
        visit(page, run)
        shown(page, ANSWER, "Helped most")  # the first target, without a click
        assert page.evaluate("document.documentElement.scrollWidth") == PHONE[0]
    finally:
        page.size(*DESKTOP)


def test_nothing_but_the_page_is_served(texts: str) -> None:
    """Files of this machine, analytics and foreign code have no address."""
    with urllib.request.urlopen(texts) as answer:
        policy = answer.headers["content-security-policy"]
        content = answer.read().decode()
    assert "default-src 'self'" in policy and "https:" not in policy
    assert "fonts.googleapis" not in content and os.environ["GRADIO_ANALYTICS_ENABLED"] == "False"
    for path in ("/etc/passwd", str(Path(__file__).resolve()), str(Path.cwd() / "pyproject.toml")):
        with pytest.raises(urllib.error.HTTPError) as error:
            urllib.request.urlopen(f"{texts}gradio_api/file={path}")
        assert error.value.code in (403, 404)


def test_large_uploads_are_refused(pictures: str) -> None:
    boundary = "x" * 20
    head = f'--{boundary}\r\nContent-Disposition: form-data; name="files"; filename="a.png"\r\n\r\n'
    data = head.encode() + b"\0" * 11_000_000 + f"\r\n--{boundary}--\r\n".encode()
    request = urllib.request.Request(f"{pictures}gradio_api/upload", data)
    request.add_header("Content-Type", f"multipart/form-data; boundary={boundary}")
    with pytest.raises((urllib.error.HTTPError, ConnectionError, urllib.error.URLError)) as error:
        urllib.request.urlopen(request)
    if isinstance(error.value, urllib.error.HTTPError):
        assert error.value.code == 413


def test_a_password_closes_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(AUTH, "me:secret")
    with served(RunSession(hostile_run())) as url:
        request = urllib.request.Request(f"{url}config")
        with pytest.raises(urllib.error.HTTPError) as error:
            urllib.request.urlopen(request)
        assert error.value.code == 401
    monkeypatch.setenv(AUTH, base64.b64encode(b"x").decode())
    with pytest.raises(ValueError, match="has no user or no password"):
        serve(RunSession(hostile_run()), port=None, block=False)


@pytest.mark.parametrize("size", [DESKTOP, PHONE], ids=["text", "phone"])
def test_the_pictures_of_the_docs(
    page: Page, reviews: str, size: tuple[int, int], tmp_path: Path, request: Any
) -> None:
    """A typed target and its rows. `HF_TRAK_PICTURES=docs/images` draws those of the docs again."""
    place = Path(os.environ.get("HF_TRAK_PICTURES", tmp_path))
    page.size(*size, mobile=size is PHONE)
    try:
        visit(page, reviews)
        put(page, "#field-0", "the plot was very dull")
        page.press("Tab")
        click(page, "#ask-button")
        text = shown(page, ANSWER, "Helped most")
        assert "the plot was very dull" in text.partition("Helped most")[2].partition("row")[2][:60]
        page.evaluate(f"document.querySelector('{ANSWER if size is PHONE else 'body'}').scrollIntoView()")
        wait(page, f"document.querySelector('{ANSWER} iframe').clientHeight > 300")
        drawn = page.screenshot(place / f"viewer_{request.node.callspec.id}.png")
    finally:
        page.size(*DESKTOP)
    assert 10_000 < drawn.stat().st_size < 150_000
