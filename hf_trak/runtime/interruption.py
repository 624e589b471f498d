"""Log how to continue when a run is interrupted by Ctrl-C, or by the SIGTERM that clusters send before preemption."""

import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

logger = logging.getLogger(__name__)


class _Terminated(BaseException):
    """Raised instead of dying of SIGTERM at once, so that unfinished files are removed on the way out."""


@contextmanager
def log_on_interrupt(message: Callable[[], str]) -> Iterator[None]:
    """Log a message when the block is interrupted, and let the interruption take its course.

    Ctrl-C stays a `KeyboardInterrupt`. After SIGTERM the process still dies of SIGTERM, as the sender expects. A
    handler of SIGTERM that other code has installed is left in place.

    Args:
        message: returns what has been done and how to continue; called when the block is interrupted.

    Raises:
        KeyboardInterrupt: the block was interrupted by Ctrl-C.
    """
    mine = threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    owner = os.getpid()

    def terminate(number: int, frame: FrameType | None) -> None:
        if os.getpid() == owner:
            raise _Terminated
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a forked worker dies as it would without this
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
            raise  # the outer block, which installed the handler, ends the process once blocks between have cleaned up
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)
        raise  # not reached where SIGTERM ends a process
    finally:
        if mine:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
