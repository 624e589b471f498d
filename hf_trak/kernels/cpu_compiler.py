"""The functions of `cuda_ext/cpu/`, compiled with the C compiler of the machine, where there is one.

A compiled function does in one call what takes torch hundreds of operators. It is an implementation of the same map
with the same bits: machines without a compiler lose time and nothing else.
"""

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

from hf_trak.kernels.cache import DIRECTORY_VARIABLE, directory
from hf_trak.kernels.sources import cpu_source

logger = logging.getLogger(__name__)

COMPILERS = ("cc", "gcc", "clang")
OPTIONS = ("-O3", "-std=c11", "-fPIC", "-shared", "-ffp-contract=off")
_SECONDS = 60
_DIGEST = 64  # length of a SHA-256 in hexadecimal digits


@cache
def compiler() -> str | None:
    """Find the C compiler: `$CC` where it is one program, or else `cc`, `gcc` or `clang`. `None` but on Linux."""
    if not sys.platform.startswith("linux"):
        return None
    given = os.environ.get("CC")
    for name in (given,) if given else COMPILERS:
        path = shutil.which(name)
        if path is not None:
            return os.path.realpath(path)
    return None


def path_of(name: str) -> Path | None:
    """Return the path of a compiled file, whose name holds a digest of what it depends on; `None` for no compiler."""
    program = compiler()
    if program is None:
        return None
    status = os.stat(program)
    key = "\0".join(
        (cpu_source(name), program, str(status.st_size), str(status.st_mtime_ns), platform.machine(), *OPTIONS)
    )
    return directory() / f"cpu-{name}-{hashlib.sha256(key.encode()).hexdigest()[:32]}.so"


def compiled(name: str, compile_now: bool = True) -> ctypes.CDLL | None:
    """Load the functions of `cuda_ext/cpu/<name>.c`, from the disk or from the compiler.

    The compiled file is kept where the compiled kernels for GPUs are. Many processes may do this at once: each writes
    a file of its own and renames it. A file that is damaged is compiled again.

    Args:
        name: name of the file without its suffix.
        compile_now: whether to compile what is not on the disk.

    Returns:
        The library, or `None` where there is none: no compiler, or one that does not compile the file, which is
        logged.
    """
    path = path_of(name)
    if path is None:
        return None
    if not _is_whole(path):
        if not compile_now:
            return None
        return _compiled_now(name, path)
    return _loaded(path)


def _compiled_now(name: str, path: Path) -> ctypes.CDLL | None:
    with tempfile.TemporaryDirectory() as scratch:
        built, given = Path(scratch) / path.name, Path(scratch) / f"{name}.c"
        given.write_text(cpu_source(name), encoding="utf-8")
        command = [str(compiler()), *OPTIONS, "-o", str(built), str(given)]
        try:
            subprocess.run(command, check=True, capture_output=True, text=True, timeout=_SECONDS)
        except (OSError, subprocess.SubprocessError) as error:
            said = (getattr(error, "stderr", None) or str(error)).strip()
            logger.info("`%s` failed, so that torch operators are used: %s", " ".join(command), said)
            return None
        image = built.read_bytes()
        try:
            _write(path, image)
        except OSError as error:
            logger.warning(
                "The compiled function %s cannot be kept in %s (%s): it is compiled again in every process. Set %s to "
                "a directory that can be written to.", name, path.parent, error, DIRECTORY_VARIABLE,
            )  # fmt: skip
        return _loaded(built)


def _loaded(path: Path) -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:  # a directory whose files may not be executed, or a library of another system
        logger.info("%s cannot be loaded (%s), so that torch operators are used.", path, error)
        return None


def _write(path: Path, image: bytes) -> None:
    """Write a library, followed by its digest, which loaders do not read, under a temporary name, and rename it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.stem, suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(image + hashlib.sha256(image).hexdigest().encode())
        os.replace(temporary, path)
    except OSError:
        Path(temporary).unlink(missing_ok=True)
        raise


def _is_whole(path: Path) -> bool:
    """Tell whether a file is there and ends with the digest of the rest."""
    try:
        content = path.read_bytes()
    except OSError:
        return False
    return content[-_DIGEST:].decode(errors="replace") == hashlib.sha256(content[:-_DIGEST]).hexdigest()
