"""Functions of `cuda_ext/cpu/`, which the machine's C compiler compiles where it has one."""

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from hf_trak.kernels import cache
from hf_trak.kernels.arguments import VARIABLE
from hf_trak.kernels.sources import cpu_source

logger = logging.getLogger(__name__)


COMPILERS = ("cc", "gcc", "clang")

OPTIONS = ("-O3", "-std=c11", "-fPIC", "-shared", "-ffp-contract=off")

_SECONDS = 60


@functools.cache
def compiler() -> str | None:
    """Find the C compiler: `$CC` where it is one program, or else `cc`, `gcc` or `clang`. `None` but on Linux."""
    if not sys.platform.startswith("linux"):
        return None
    given = os.environ.get("CC")
    path = next(filter(None, map(shutil.which, (given,) if given else COMPILERS)), None)
    return None if path is None else os.path.realpath(path)


def name_of(name: str) -> str | None:
    """Name a compiled file by a digest of everything that it depends on; `None` for no compiler."""
    if (program := compiler()) is None:
        return None
    status = os.stat(program)
    key = "\0".join(
        (cpu_source(name), program, str(status.st_size), str(status.st_mtime_ns), platform.machine(), *OPTIONS)
    )
    return f"cpu-{name}-{hashlib.sha256(key.encode()).hexdigest()[:32]}.so"


def compiled(name: str, compile_now: bool = True) -> ctypes.CDLL | None:
    """Load the functions of `cuda_ext/cpu/<name>.c`, from the disk or from the compiler.

    The compiled file is kept where the compiled kernels for GPUs are, see `hf_trak.kernels.cache`. A file that is
    damaged is compiled again.

    Args:
        name: name of the file without its suffix.
        compile_now: whether to compile what is not on the disk.

    Returns:
        The library, or `None` without a compiler or with one that does not compile the file. A failure is logged.
    """
    if (file := name_of(name)) is None:
        return None
    image = cache.read(file)
    if image is None and compile_now and (image := _compiled_now(name)) is not None:
        cache.keep(file, image, f"function {name}")
    return None if image is None else _loaded(file, image)


def _compiled_now(name: str) -> bytes | None:
    with tempfile.TemporaryDirectory() as scratch:
        built, given = Path(scratch) / f"{name}.so", Path(scratch) / f"{name}.c"
        given.write_text(cpu_source(name), encoding="utf-8")
        command = [str(compiler()), *OPTIONS, "-o", str(built), str(given)]
        try:
            subprocess.run(command, check=True, capture_output=True, text=True, timeout=_SECONDS)
        except (OSError, subprocess.SubprocessError) as error:
            said = (getattr(error, "stderr", None) or str(error)).strip()
            logger.info("`%s` failed, so that torch operators are used: %s", " ".join(command), said)
            return None
        return built.read_bytes()


def _loaded(file: str, image: bytes) -> ctypes.CDLL | None:
    """Load a library from memory, so that nobody can exchange it after it was checked."""
    try:
        handle = os.memfd_create(file)  # stays open: the loader takes libraries of one path for the same one
        with open(handle, "wb", closefd=False) as memory:
            memory.write(image)
        return ctypes.CDLL(f"/proc/self/fd/{handle}")
    except OSError as error:  # a system without /proc, or a library of another system
        logger.info("%s cannot be loaded (%s), so that torch operators are used.", file, error)
        return None


_WORTH_COMPILING = 2**27
"""Numbers that torch operators add first, about .1 s: compiling takes longer than a small model's projections."""

_LOCK = threading.Lock()


class CompiledFunction:
    """A compiled function of this process: looked for on the disk at first, and compiled when that pays.

    The function and the torch operators give the same bits, so that either may be used at any time. Before its first
    use the function is compared with torch on a small case, and left alone if the results differ.
    """

    def __init__(
        self, file: str, name: str, arguments: Sequence[type], is_right: Callable[[Callable[..., None]], bool]
    ) -> None:
        """
        Args:
            file: name of the file in `cuda_ext/cpu/`, without its suffix.
            name: name of the function, which returns nothing.
            arguments: types of its arguments in `ctypes`.
            is_right: compares the function with its definition.
        """
        self._file, self._name, self._arguments, self._is_right = file, name, arguments, is_right
        self._function: Callable[..., None] | None = None
        self._looked = self._compiled = False
        self._numbers = 0

    def is_there(self, numbers: int) -> bool:
        """Tell whether the function can be called: not if there is none, or if `HF_TRAK_BACKEND` is `torch`.

        Args:
            numbers: how many numbers torch operators would add otherwise.
        """
        if os.environ.get(VARIABLE) == "torch":
            return False
        if self._function is None and not self._compiled:
            self._look(numbers)
        return self._function is not None

    def __call__(self, *arguments: int) -> None:
        """Call the function, which [`~CompiledFunction.is_there`], with numbers and addresses."""
        assert self._function is not None
        self._function(*arguments)

    def _look(self, numbers: int) -> None:
        """Load the function from the disk, or compile it when enough numbers have been added without it."""
        with _LOCK:
            self._numbers += numbers
            worth = self._numbers >= _WORTH_COMPILING
            if self._compiled or (self._looked and not worth):
                return
            self._looked, self._compiled = True, worth
            if (library := compiled(self._file, compile_now=worth)) is None:
                return
            self._compiled = True
            function = getattr(library, self._name)
            function.argtypes, function.restype = self._arguments, None
            if self._is_right(function):
                self._function = function
            else:
                logger.warning(
                    "The compiled function %s gives other results than torch, and is not used. Please report this "
                    "with the name and the version of the C compiler.",
                    self._name,
                )
