"""The layout of the page, with Gradio. What its controls do is in `handlers.py`."""

import importlib.util
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_trak.viewer.gate import share_queue, tell_once
from hf_trak.viewer.handlers import (
    ANY_LABEL,
    BY_INFLUENCE,
    BY_NUMBER,
    EXPECTED_ERRORS,
    FORMATS,
    MOST_ROWS,
    PREDICTION,
    Handlers,
    Listing,
    message_of,
)
from hf_trak.viewer.index_session import IndexSession
from hf_trak.viewer.session import Answer, RunSession, Session
from hf_trak.viewer.target_form import IMAGES, MOST_CHARACTERS

if TYPE_CHECKING:
    import gradio

Control = tuple[str, Any]
"""Name of a value, and the component that it comes from."""

CSS = """
.trak-frame { width: 100%; min-height: 8rem; border: 1px solid var(--border-color-primary); border-radius: .5rem; }
.gradio-container { width: 100%; max-width: 76rem !important; margin: 0 auto !important; }
#answer-file, #rows-file { max-height: 6.5rem; overflow: hidden; }
"""

_FIT = """
const fit = () => {
  const frame = element.querySelector("iframe");
  if (!frame) return;
  const size = () => {
    const page = frame.contentDocument && frame.contentDocument.body;
    if (page && page.scrollHeight) frame.style.height = (page.scrollHeight + 6) + "px";
  };
  frame.onload = size;
  size();
};
watch("value", fit);
fit();
new ResizeObserver(fit).observe(element);
"""
"""Makes a frame as high as what it shows. The frame itself runs no script."""

_SECONDS_KEPT = 3600


def require_gradio() -> None:
    """Look for Gradio without importing it.

    Raises:
        ImportError: it is not installed.
    """
    if importlib.util.find_spec("gradio") is None:
        raise ImportError("The viewer needs Gradio, which is not installed. Install it with `pip install gradio`.")


def import_gradio() -> Any:
    """Import Gradio with its analytics switched off, and with its files below [`private_directory`].

    Raises:
        ImportError: it is not installed.
    """
    require_gradio()
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"
    os.environ["GRADIO_TEMP_DIR"] = str(private_directory() / FILES)
    return importlib.import_module("gradio")


FILES = "files"
"""Name of the directory with uploads and exports."""

_PRIVATE = list[tempfile.TemporaryDirectory[str]]()


def private_directory() -> Path:
    """Return the directory of this process for uploads, exports and features of targets, which others cannot read."""
    if not _PRIVATE:
        _PRIVATE.append(tempfile.TemporaryDirectory(prefix="hf_trak-viewer-", ignore_cleanup_errors=True))
        (Path(_PRIVATE[0].name) / FILES).mkdir()
    return Path(_PRIVATE[0].name)


def remove_private_directory() -> None:
    """Remove the directory of this process, if it has one."""
    while _PRIVATE:
        _PRIVATE.pop().cleanup()
        os.environ.pop("GRADIO_TEMP_DIR", None)


def make_app(session: Session) -> "gradio.Blocks":
    """Lay out the page of a session.

    Args:
        session (`Session`):
            An index with its model, or a saved run.

    Returns:
        `gradio.Blocks`: the page, which [`~hf_trak.viewer.server.serve`] serves.

    Raises:
        ImportError: Gradio is not installed.
    """
    gr = import_gradio()
    session.scratch = private_directory()
    page = _Page(gr, Handlers(session, session.scratch / FILES))
    with _blocks(gr)(
        title=session.title, analytics_enabled=False, fill_width=True, delete_cache=(_SECONDS_KEPT, _SECONDS_KEPT)
    ) as blocks:
        page.lay_out(blocks)
    blocks.queue(default_concurrency_limit=1, max_size=32, api_open=False)
    share_queue(blocks._queue)
    return blocks


def _blocks(gr: Any) -> Any:
    """Make the class of a page that tells its errors to the visitor, and unexpected ones to the log."""

    class Blocks(gr.Blocks):
        async def process_api(self, *args: Any, **kwargs: Any) -> Any:
            try:
                return await super().process_api(*args, **kwargs)
            except gr.Error as error:  # of a control that was given another value than it takes
                raise gr.Error(message_of(ValueError(error.message)), print_exception=False) from error
            except EXPECTED_ERRORS as error:
                raise gr.Error(message_of(error), print_exception=False) from error
            except Exception as error:  # whatever a request holds, the page goes on
                tell_once(error)
                text = "The question cannot be answered. The log of the viewer says more."
                raise gr.Error(text, print_exception=False) from error

    return Blocks


class _Page:
    """Builds the tabs of a page, whose events wait for each other."""

    def __init__(self, gr: Any, handlers: Handlers) -> None:
        self.gr = gr
        self.handlers = handlers
        self.session = handlers.session

    def lay_out(self, blocks: Any) -> None:
        gr, rows = self.gr, self.session.rows
        gr.HTML(f"<h1>{message_of(ValueError(self.session.title))}</h1>")
        answer = gr.State(None, time_to_live=_SECONDS_KEPT)
        with gr.Tabs():
            if isinstance(self.session, IndexSession):
                with gr.Tab("Ask", id="ask"):
                    self._ask(self.session, answer)
            elif isinstance(self.session, RunSession):
                with gr.Tab("Targets", id="targets"):
                    self._targets(self.session, answer, blocks)
            with gr.Tab("Rows", id="rows"):
                self._rows()
            if rows.searchable and rows.group_columns():
                with gr.Tab("Groups", id="groups"):
                    self._groups(answer)
            with gr.Tab("About", id="about"):
                gr.HTML(self.handlers.facts(), js_on_load=_FIT, elem_id="about-view")
        if isinstance(self.session, IndexSession):
            self._api(self.session)

    def _ask(self, session: IndexSession, answer: Any) -> None:
        gr = self.gr
        controls, submitting = self._fields(session)
        with gr.Accordion("Options", open=False):
            controls += self._options(session)
        button = gr.Button("Find training rows", variant="primary", elem_id="ask-button")
        listing, view = self._listing("answer"), self._view("answer")
        names = [name for name, _ in controls]

        def asked(*values: Any) -> tuple[Answer, str]:
            given, wanted = values[: len(names)], Listing.of(*values[len(names) :])
            found = self.handlers.ask(dict(zip(names, given, strict=True)))
            return found, self.handlers.answer(found, wanted)

        inputs = [*(component for _, component in controls), *listing]
        self._on([button.click, *(one.submit for one in submitting)], asked, inputs, [answer, view])
        self._after(answer, listing, view)

    def _targets(self, session: RunSession, answer: Any, blocks: Any) -> None:
        gr = self.gr
        number = gr.Number(0, label=f"Target, 0 to {len(session) - 1}", precision=0, minimum=0, elem_id="target")
        button = gr.Button("Show", variant="primary", elem_id="ask-button")
        listing, view = self._listing("answer"), self._view("answer")

        def shown(chosen: Any, *values: Any) -> tuple[Answer, str]:
            found = self.handlers.target(chosen)
            return found, self.handlers.answer(found, Listing.of(*values))

        self._on([blocks.load, button.click, number.submit], shown, [number, *listing], [answer, view])
        self._after(answer, listing, view)

    def _fields(self, session: IndexSession) -> tuple[list[Control], list[Any]]:
        """Make the fields of the form; also return those in which Enter asks."""
        gr, form = self.gr, session.form
        controls, submitting = list[Control](), list[Any]()
        texts = ["json"] if form.as_json else form.texts
        example = session.rows.example(form.texts)
        for place, name in enumerate(texts):
            label = "Target, one row as JSON" if form.as_json else f"Target: {name}"
            box = gr.Textbox(
                example.get(name, ""), label=label, lines=2, max_lines=8, max_length=MOST_CHARACTERS,
                elem_id=f"field-{place}",
            )  # fmt: skip
            controls.append((f"text.{name}", box))
            submitting.append(box)
        if form.upload is not None:
            upload = gr.File(label="Target: an image", file_types=list(IMAGES), type="binary", elem_id="upload")
            controls.append(("upload", upload))
        if form.label_names:
            choices = [PREDICTION, *form.label_names]
            controls.append(("label", gr.Dropdown(choices, value=PREDICTION, label="Label", elem_id="label")))
        elif form.label is not None:
            controls.append(("label", gr.Textbox(label="Label, a number", max_length=40, elem_id="label")))
        if form.generates:
            box = gr.Checkbox(False, label="Attribute what the model writes next", elem_id="predicted")
            controls.append(("predicted", box))
            box = gr.Textbox(label="One word of what is said; empty for all", max_length=200, elem_id="words")
            controls.append(("words", box))
        return controls, submitting

    def _options(self, session: IndexSession) -> list[Control]:
        gr, ids = self.gr, [str(one) for one in session.model_ids]
        controls: list[Control] = [
            ("ridge", gr.Number(None, label="λ, relative; empty for that of the index", elem_id="ridge"))
        ]
        if len(ids) > 1:
            controls.append(("checkpoints", gr.CheckboxGroup(ids, value=ids, label="Checkpoints", elem_id="ids")))
        if session.reranks:
            label = "Rows of the shortlist to score exactly; 0 for the scores of the index"
            controls.append(("rerank", gr.Number(0, label=label, precision=0, minimum=0, elem_id="rerank")))
        if not session.form.label_names and session.form.upload is None:
            controls.append(("tokens", gr.Checkbox(True, label="Mark the tokens that matter", elem_id="tokens")))
        return controls

    def _listing(self, name: str, count: bool = True) -> list[Any]:
        """Make the controls that filter rows: number, text, label."""
        gr, rows = self.gr, self.session.rows
        with gr.Row():
            number = gr.Number(10, label="Rows of each end", precision=0, minimum=1, maximum=MOST_ROWS, visible=count)
            shown = rows.searchable and bool(rows.columns.texts)
            text = gr.Textbox(label="Search in rows", max_length=200, elem_id=f"{name}-search", visible=shown)
            labels = rows.labels() if rows.searchable else []
            label = gr.Dropdown(
                [ANY_LABEL, *labels], value=ANY_LABEL, label="Label of rows", elem_id=f"{name}-label",
                visible=bool(labels),
            )  # fmt: skip
        return [number, text, label]

    def _view(self, name: str) -> Any:
        return self.gr.HTML(js_on_load=_FIT, elem_id=f"{name}-view")

    def _after(self, answer: Any, listing: Sequence[Any], view: Any) -> None:
        """Filter and export an answer that is there."""

        def filtered(found: Answer | None, *values: Any) -> str:
            return "" if found is None else self.handlers.answer(found, Listing.of(*values))

        number, text, label = listing
        self._on([number.submit, text.submit, label.input], filtered, [answer, *listing], [view])

        def exported(found: Answer | None, form: str, *values: Any) -> str:
            return self.handlers.export_answer(found, Listing.of(*values), form)

        self._export("answer", exported, [answer], listing)

    def _export(self, name: str, fn: Callable[..., str], before: Sequence[Any], after: Sequence[Any]) -> None:
        gr = self.gr
        with gr.Row():
            form = gr.Dropdown(list(FORMATS), value=FORMATS[0], label="Export as", elem_id=f"{name}-form")
            button = gr.Button("Export what is shown", elem_id=f"{name}-export")
            file = gr.File(label="Exported file", interactive=False, height=90, elem_id=f"{name}-file")
        self._on([button.click], fn, [*before, form, *after], [file])

    def _rows(self) -> None:
        gr = self.gr
        listing = self._listing("rows", count=False)
        with gr.Row():
            order = gr.Radio([BY_NUMBER, BY_INFLUENCE], value=BY_NUMBER, label="Sort by", elem_id="rows-order")
            page = gr.Number(1, label="Page", precision=0, minimum=1, elem_id="rows-page")
        button = gr.Button("List rows", variant="primary", elem_id="rows-button")
        view = self._view("rows")
        inputs = [*listing, order, page]

        def shown(count: Any, text: Any, label: Any, by: str, number: Any) -> str:
            return self.handlers.rows(Listing.of(count, text, label), by, number)

        self._on([button.click, listing[1].submit, page.submit], shown, inputs, [view])

        def exported(form: str, count: Any, text: Any, label: Any, by: str, number: Any) -> str:
            return self.handlers.export_rows(Listing.of(count, text, label), by, number, form)

        self._export("rows", exported, [], inputs)

    def _groups(self, answer: Any) -> None:
        gr = self.gr
        columns = self.session.rows.group_columns()
        column = gr.Dropdown(columns, value=columns[-1], label="Groups by column", elem_id="groups-column")
        button = gr.Button("Add up scores", variant="primary", elem_id="groups-button")
        self._on([button.click], self.handlers.groups, [answer, column], [self._view("groups")])

    def _on(
        self, events: Sequence[Any], fn: Callable[..., Any], inputs: Sequence[Any], outputs: Sequence[Any]
    ) -> None:
        """Call a function on events, one call of the page at a time."""
        for event in events:
            event(
                fn, inputs=list(inputs), outputs=list(outputs), api_visibility="private",
                concurrency_limit=1, concurrency_id="session",
            )  # fmt: skip

    def _api(self, session: IndexSession) -> None:
        """Offer the same question to programs, as `/attribute`."""

        def attribute(
            texts: dict[str, str],
            label: str | None = None,
            count: int = 10,
            search: str = "",
            ridge: float | None = None,
            rerank: int = 0,
            predicted: bool = False,
            words: str = "",
        ) -> list[dict[str, Any]]:
            """Find the training rows that helped and harmed a target."""
            values = {f"text.{name}": text for name, text in texts.items()}
            options = {"label": label, "ridge": ridge, "rerank": rerank, "predicted": predicted, "words": words}
            found = self.handlers.ask({**values, **options})
            return self.handlers.answer_rows(found, Listing.of(count, search, None))

        if session.form.upload is None:
            self.gr.api(attribute, api_name="attribute", concurrency_limit=1, concurrency_id="session")
