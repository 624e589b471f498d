"""Compilation with NVRTC, from CUDA C++ to a cubin, without a compiler, headers, a driver or a GPU on the machine."""

import hashlib
import importlib
import logging
import os
import re
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from hf_trak.errors import KernelError
from hf_trak.kernels.sources import Kernel, source

OPTIONS = ("--std=c++17", "--ptxas-options=-v", "--extra-device-vectorization")


_WAY_OUT = "Set HF_TRAK_BACKEND=torch to project with torch operators, which give the same features more slowly."


@dataclass(frozen=True)
class Cubin:
    """A compiled kernel."""

    name: str
    """Name of the kernel in the cubin."""

    image: bytes

    log: str = ""
    """Log of the compiler; empty for a cubin from the disk."""


@dataclass(frozen=True)
class Resources:
    """Resources of one kernel, from the compiler's report."""

    registers: int
    stack_bytes: int
    spill_bytes: int


@cache
def _nvrtc() -> Any:
    try:
        module = importlib.import_module("cuda.bindings.nvrtc")
        module.nvrtcVersion()  # loads the library
    except (ImportError, RuntimeError, OSError) as error:
        raise KernelError(
            f"NVRTC, the CUDA runtime compiler, is not available ({error}). torch's CUDA wheels bring it: install "
            "torch for CUDA, or `pip install cuda-bindings` and `nvidia-cuda-nvrtc` of the driver's major version. "
            f"{_WAY_OUT}"
        ) from error
    return module


def nvrtc_version() -> tuple[int, int]:
    """Return the version of the compiler.

    Raises:
        KernelError: NVRTC is missing.
    """
    result, major, minor = _nvrtc().nvrtcVersion()
    _check(result, "nvrtcVersion")
    return major, minor


def architecture(capability: tuple[int, int]) -> str:
    """Choose the architecture to compile for, such as `90a`, for a GPU of a compute capability.

    It is the newest one that NVRTC knows and that the GPU can run: machine code runs on the same and on higher minor
    numbers of its major number.

    Raises:
        KernelError: NVRTC is missing or knows no such architecture.
    """
    result, known = _nvrtc().nvrtcGetSupportedArchs()
    _check(result, "nvrtcGetSupportedArchs")
    major, minor = capability
    fitting = [arch for arch in known if arch // 10 == major and arch % 10 <= minor]
    if not fitting:
        raise KernelError(
            f"The GPU has compute capability {major}.{minor}, which NVRTC {'.'.join(map(str, nvrtc_version()))} does "
            f"not compile for. It knows {', '.join(f'{a // 10}.{a % 10}' for a in sorted(known))}. GPUs before 7.5 "
            f"need a torch built for CUDA 12, newer ones a newer CUDA. {_WAY_OUT}"
        )
    best = max(fitting)
    return f"{best}a" if best == 90 else str(best)


def compile_kernel(kernel: Kernel, arch: str) -> Cubin:
    """Compile one kernel for an architecture such as `80` or `90a`.

    Raises:
        KernelError: NVRTC is missing, or refuses the program; shows the log.
    """
    nvrtc = _nvrtc()
    result, program = nvrtc.nvrtcCreateProgram(source(kernel.file).encode(), f"{kernel.file}.cu".encode(), 0, [], [])
    _check(result, "nvrtcCreateProgram")
    try:
        expression = kernel.expression.encode()
        _check(nvrtc.nvrtcAddNameExpression(program, expression)[0], "nvrtcAddNameExpression")
        options = [f"--gpu-architecture=sm_{arch}".encode(), *(option.encode() for option in OPTIONS)]
        (result,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
        log = (
            _text(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog, program)
            .rstrip(b"\0")
            .decode(errors="replace")
        )
        if result != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            raise KernelError(
                f"NVRTC {'.'.join(map(str, nvrtc_version()))} does not compile `{kernel.expression}` for sm_{arch} "
                f"({result.name}). {_WAY_OUT} Please report this with the compiler's log:\n{log}"
            )
        result, name = nvrtc.nvrtcGetLoweredName(program, expression)
        _check(result, "nvrtcGetLoweredName")
        return Cubin(name.decode(), _text(nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN, program), log)
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def resources(log: str) -> Resources:
    """Read registers, stack and spills from a log of [`compile_kernel`].

    Raises:
        ValueError: the log has no such report.
    """
    spills = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", log)
    registers = re.findall(r"Used (\d+) registers", log)
    if len(spills) != 1 or len(registers) != 1:
        raise ValueError(f"Expected one report of registers and spills in the compiler's log. The log is:\n{log}")
    stack, stores, loads = map(int, spills[0])
    return Resources(int(registers[0]), stack, stores + loads)


def _text(size_of: Any, read: Any, program: Any) -> bytes:
    result, size = size_of(program)
    _check(result, size_of.__name__)
    data = bytes(size)  # written into by the call: cuda-bindings takes a `char *` in this form
    _check(read(program, data)[0], read.__name__)
    return data


def _check(result: Any, call: str) -> None:
    if result != _nvrtc().nvrtcResult.NVRTC_SUCCESS:
        raise KernelError(f"{call} failed with {result.name}. Expected NVRTC to work. {_WAY_OUT}")


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
