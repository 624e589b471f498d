"""Serving the page: on this machine alone unless another host is named, and with a policy that keeps it to itself."""

import os
from typing import TYPE_CHECKING, Any

from hf_trak.viewer.app import CSS, import_gradio, make_app
from hf_trak.viewer.session import Session
from hf_trak.viewer.target_form import MOST_BYTES

if TYPE_CHECKING:
    import gradio

AUTH = "HF_TRAK_VIEWER_AUTH"
"""Environment variable with `user:password`, which visitors then have to give."""

LOOPBACK = ("127.0.0.1", "localhost", "::1")

_POLICY = (
    "default-src 'self'; script-src 'self' 'unsafe-inline' 'unsafe-eval'; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data: blob:; media-src 'self' data: blob:; font-src 'self' data:; connect-src 'self' data: blob:; "
    "worker-src 'self' blob:; frame-src 'self'; object-src 'none'; base-uri 'self'; form-action 'self'"
)
_HEADERS = (
    (b"content-security-policy", _POLICY.encode()),
    (b"referrer-policy", b"no-referrer"),
    (b"x-content-type-options", b"nosniff"),
)
_MOST_SESSIONS = 32


class SecurityHeaders:
    """Adds headers to every answer of an ASGI application."""

    def __init__(self, app: Any) -> None:
        """
        Args:
            app: the application.
        """
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Handle one request."""

        async def with_headers(message: Any) -> None:
            if message["type"] == "http.response.start":
                names = {name for name, _ in _HEADERS}
                kept = [(name, value) for name, value in message["headers"] if name.lower() not in names]
                message = {**message, "headers": [*kept, *_HEADERS]}
            await send(message)

        await self._app(scope, receive, with_headers)


def serve(session: Session, host: str = "127.0.0.1", port: int | None = 7860, block: bool = True) -> "gradio.Blocks":
    """Serve the page of a session until the process is interrupted.

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

    Returns:
        `gradio.Blocks`: the page; its `local_url` is the address.

    Raises:
        ImportError: Gradio is not installed (extra `viewer`).
        OSError: the port is taken.
        ValueError: `HF_TRAK_VIEWER_AUTH` has no user or no password.
    """
    gr = import_gradio()
    from starlette.middleware import Middleware  # comes with Gradio

    app = make_app(session)
    app.launch(
        server_name=host,
        server_port=port,
        auth=_auth(),
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
        app_kwargs={"middleware": [Middleware(SecurityHeaders)]},
        # Names of fonts alone: none is downloaded.
        theme=gr.themes.Default(font=["system-ui", "sans-serif"], font_mono=["ui-monospace", "monospace"]),
        css=CSS,
        prevent_thread_lock=True,
    )
    if block:
        app.block_thread()
    return app


def _auth() -> tuple[str, str] | None:
    given = os.environ.get(AUTH)
    if not given:
        return None
    user, _, password = given.partition(":")
    if not user or not password:
        raise ValueError(f"The environment variable {AUTH} has no user or no password. Expected `user:password`.")
    return user, password
