"""Ctrl-C and SIGTERM (as clusters send before they take a machine away) end with a message that says how to go on."""

import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

logger = logging.getLogger(__name__)


class _Terminated(BaseException):
    """Raised in place of dying of SIGTERM, so that files in progress are removed on the way out."""


@contextmanager
def log_on_interrupt(message: Callable[[], str]) -> Iterator[None]:
    """Log a message when the block is interrupted, and let the interruption take its course.

    Ctrl-C stays a `KeyboardInterrupt`; after SIGTERM the process still dies of SIGTERM, as whoever sent it expects.
    A handler of SIGTERM that somebody else has installed is left alone.

    Args:
        message: what has been done, and how to go on; called when the block is interrupted.

    Raises:
        KeyboardInterrupt: the block was interrupted by Ctrl-C, as it would be without this.
    """
    mine = threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    owner = os.getpid()

    def terminate(number: int, frame: FrameType | None) -> None:
        if os.getpid() == owner:
            raise _Terminated
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a forked worker dies as it would have
        os.kill(os.getpid(), signal.SIGTERM)

    try:
        if mine:
            signal.signal(signal.SIGTERM, terminate)
        yield
    except KeyboardInterrupt:
        logger.warning("Interrupted. %s", message())
        raise
    except _Terminated:
        logger.warning("Terminated by SIGTERM. %s", message())
        if not mine:
            raise  # the block that installed the handler lets the process die, after blocks between have cleaned up
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)
        raise  # not reached where SIGTERM ends a process
    finally:
        if mine:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
