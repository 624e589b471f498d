"""Cubins on disk, so that a kernel is compiled once per machine and not once per process."""

import hashlib
import logging
import os
import tempfile
from pathlib import Path

from hf_trak.kernels.compiler import OPTIONS, Cubin, compile_kernel, nvrtc_version
from hf_trak.kernels.sources import Kernel, source

logger = logging.getLogger(__name__)

DIRECTORY_VARIABLE = "HF_TRAK_KERNEL_CACHE"


def directory() -> Path:
    """Return `$HF_TRAK_KERNEL_CACHE`, or else `hf_trak/kernels` in the user's cache directory."""
    given = os.environ.get(DIRECTORY_VARIABLE)
    if given:
        return Path(given)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "hf_trak" / "kernels"


def path_of(kernel: Kernel, arch: str) -> Path:
    """Return the path of a cubin, whose name holds a digest of everything that the cubin depends on."""
    version = ".".join(map(str, nvrtc_version()))
    key = "\0".join((source(kernel.file), kernel.expression, arch, version, *OPTIONS))
    return directory() / f"{kernel.file}-sm_{arch}-{hashlib.sha256(key.encode()).hexdigest()[:32]}.cubin"


def cubin(kernel: Kernel, arch: str) -> Cubin:
    """Read a kernel's cubin from the disk, or compile it and keep it there.

    Many processes may do this at once: each writes a file of its own and renames it, and all of them write the same
    bytes. A kernel whose file is damaged is compiled again. A directory that cannot be written to is reported once per
    file.

    Raises:
        KernelError: the kernel cannot be compiled, see [`compile_kernel`].
    """
    path = path_of(kernel, arch)
    found = _read(path)
    if found is not None:
        return found
    compiled = compile_kernel(kernel, arch)
    try:
        write(path, compiled)
    except OSError as error:
        logger.warning(
            "The compiled kernel %s cannot be kept in %s (%s): it is compiled again in every process. Set %s to a "
            "directory that can be written to.",
            kernel.expression,
            path.parent,
            error,
            DIRECTORY_VARIABLE,
        )
    return compiled


def _read(path: Path) -> Cubin | None:
    """Read a file of one line, `<sha256 of the rest> <name>`, and the image; return `None` for anything else."""
    try:
        header, _, image = path.read_bytes().partition(b"\n")
    except OSError:
        return None
    digest, _, name = header.partition(b" ")
    if digest.decode(errors="replace") != hashlib.sha256(name + image).hexdigest():
        return None
    return Cubin(name.decode(), image)


def write(path: Path, compiled: Cubin) -> None:
    """Write a cubin under a temporary name and rename it. Raises `OSError`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    name = compiled.name.encode()
    digest = hashlib.sha256(name + compiled.image).hexdigest().encode()
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.stem, suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(digest + b" " + name + b"\n" + compiled.image)
        os.replace(temporary, path)
    except OSError:
        Path(temporary).unlink(missing_ok=True)
        raise
