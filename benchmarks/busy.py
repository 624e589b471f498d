"""Other programs that want the cores while something is measured, as on the machines of most users.

with competing(1):
    measure()
"""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def competing(processes: int) -> Iterator[None]:
    """Run processes that each compute without a pause on one core, until the block ends.

    Args:
        processes: number of processes; with 0 there is none.
    """
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(processes)]
    try:
        yield
    finally:
        for other in others:
            other.kill()
        for other in others:
            other.wait()
