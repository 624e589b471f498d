"""Compilation with NVRTC, from CUDA C++ to a cubin, without a compiler, headers, a driver or a GPU on the machine."""

import functools
import hashlib
import importlib
import re
from dataclasses import dataclass
from typing import Any

from hf_trak.errors import KernelError
from hf_trak.kernels import cache
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


@functools.cache
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
    if not (fitting := [arch for arch in known if arch // 10 == major and arch % 10 <= minor]):
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
        said = _text(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog, program)
        log = said.rstrip(b"\0").decode(errors="replace")
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


def name_of(kernel: Kernel, arch: str) -> str:
    """Name the file of a cubin by a digest of everything that the cubin depends on."""
    version = ".".join(map(str, nvrtc_version()))
    key = "\0".join((source(kernel.file), kernel.expression, arch, version, *OPTIONS))
    return f"{kernel.file}-sm_{arch}-{hashlib.sha256(key.encode()).hexdigest()[:32]}.cubin"


def packed(compiled: Cubin) -> bytes:
    """Return the content of a file: a line with the name, and the image."""
    return compiled.name.encode() + b"\n" + compiled.image


def cubin(kernel: Kernel, arch: str) -> Cubin:
    """Read a kernel's cubin from the disk, or compile it and keep it there.

    A kernel whose file is damaged is compiled again.

    Raises:
        KernelError: the kernel cannot be compiled, see [`compile_kernel`].
    """
    file = name_of(kernel, arch)
    if (found := cache.read(file)) is not None:
        name, _, image = found.partition(b"\n")
        return Cubin(name.decode(), image)
    compiled = compile_kernel(kernel, arch)
    cache.keep(file, packed(compiled), f"kernel {kernel.expression}")
    return compiled
