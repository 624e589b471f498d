"""Serving the page, on this machine alone unless another host is named."""

import os
from collections.abc import Callable
from typing import TYPE_CHECKING

from hf_trak.runtime.progress import log_on_interrupt
from hf_trak.viewer.app import CSS, FILES, import_gradio, make_app, private_directory, remove_private_directory
from hf_trak.viewer.gate import Gate, is_loopback
from hf_trak.viewer.session import Session
from hf_trak.viewer.target_form import MOST_BYTES

if TYPE_CHECKING:
    import gradio

AUTH = "HF_TRAK_VIEWER_AUTH"
"""Environment variable with `user:password`, which visitors then have to give."""

_MOST_SESSIONS = 32


def serve(
    session: Session,
    host: str = "127.0.0.1",
    port: int | None = 7860,
    block: bool = True,
    started: Callable[[str], None] | None = None,
) -> "gradio.Blocks":
    """Serve the page of a session until the process is interrupted.

    Uploads and exports are in a directory that others cannot read. It is removed when the process ends, and also after
    SIGTERM where this call blocks.

    Args:
        session (`Session`):
            An index with its model, or a saved run.
        host (`str`, *optional*, defaults to `"127.0.0.1"`):
            Address to listen at. `"0.0.0.0"` opens the page to everyone who can reach this machine; there is no login
            unless the environment variable `HF_TRAK_VIEWER_AUTH` is `user:password`.
        port (`int`, *optional*, defaults to 7860):
            Port to listen at. `None` takes a free one.
        block (`bool`, *optional*, defaults to `True`):
            Return only when the server has ended.
        started (`Callable`, *optional*):
            Called with the address of the page when it can be visited, where this call blocks.

    Returns:
        `gradio.Blocks`: the page; its `local_url` is the address.

    Raises:
        ImportError: Gradio is not installed.
        OSError: the port is taken.
        ValueError: `HF_TRAK_VIEWER_AUTH` has no user or no password.
    """
    if not block:
        return _launched(session, host, port)
    with log_on_interrupt(lambda: "The page is closed."):
        try:
            app = _launched(session, host, port)
            if started is not None:
                started(app.local_url)
            app.block_thread()
            app.close(verbose=False)
        finally:
            remove_private_directory()
    return app


def _launched(session: Session, host: str, port: int | None) -> "gradio.Blocks":
    gr = import_gradio()
    from starlette.middleware import Middleware  # comes with Gradio

    auth = _auth()
    app = make_app(session)
    gate = Middleware(Gate, alone=is_loopback(host), files=private_directory() / FILES)
    app.launch(
        server_name=host,
        server_port=port,
        auth=auth,
        share=False,
        show_error=False,
        quiet=True,
        allowed_paths=[],
        max_file_size=MOST_BYTES,
        ssr_mode=False,
        pwa=False,
        mcp_server=False,
        enable_monitoring=False,
        footer_links=[],
        state_session_capacity=_MOST_SESSIONS,
        app_kwargs={"middleware": [gate]},
        # Names of fonts alone: none is downloaded.
        theme=gr.themes.Default(font=["system-ui", "sans-serif"], font_mono=["ui-monospace", "monospace"]),
        css=CSS,
        prevent_thread_lock=True,
    )
    return app


def _auth() -> tuple[str, str] | None:
    if not (given := os.environ.get(AUTH)):
        return None
    user, _, password = given.partition(":")
    if not user or not password:
        raise ValueError(f"The environment variable {AUTH} has no user or no password. Expected `user:password`.")
    return user, password
