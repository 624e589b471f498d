"""Loading and launching of kernels through the driver, in torch's context and on its current stream."""

import ctypes
import importlib
import threading
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor

from hf_trak.errors import KernelError
from hf_trak.kernels.arguments import Destination, ReduceArguments
from hf_trak.kernels.compiler import architecture, cubin
from hf_trak.kernels.sources import REDUCE, Kernel

_MAX_GRID_Y = 65535


@dataclass(frozen=True)
class Launch:
    """One launch of a kernel."""

    kernel: Kernel
    grid: tuple[int, int, int]
    shared_bytes: int
    arguments: ctypes.Structure


class Runtime(Protocol):
    """Anything that runs launches: a GPU, or an emulation of one in tests."""

    def capability(self, device: torch.device) -> tuple[int, int]:
        """Compute capability of a device."""

    def launch(self, launch: Launch, device: torch.device) -> None:
        """Run a kernel on the memory of a device, after everything that has been launched there before."""


class CudaRuntime:
    """Runs launches on GPUs. Kernels are compiled or read from the disk when they are first launched on a device."""

    def __init__(self) -> None:
        self._functions: dict[tuple[Kernel, int], Any] = {}
        self._lock = threading.Lock()

    def capability(self, device: torch.device) -> tuple[int, int]:
        """Compute capability of a device."""
        return _capability(_index(device))

    def launch(self, launch: Launch, device: torch.device) -> None:
        """Run a kernel on torch's current stream of the device.

        Raises:
            KernelError: the kernel cannot be compiled or loaded, or the driver refuses the launch.
        """
        driver = _driver()
        index = _index(device)
        with torch.cuda.device(index):
            _make_context_current(index)
            function = self._functions.get((launch.kernel, index)) or self._load(launch, index)
            arguments = (ctypes.c_void_p * 1)(ctypes.addressof(launch.arguments))  # copied by the driver
            stream = driver.CUstream(torch.cuda.current_stream(index).cuda_stream)
            sizes = (*launch.grid, launch.kernel.threads, 1, 1, launch.shared_bytes)
            (result,) = driver.cuLaunchKernel(function, *sizes, stream, ctypes.addressof(arguments), 0)
        _check(result, f"The launch of `{launch.kernel.expression}` with grid {launch.grid} on cuda:{index}")

    def _load(self, launch: Launch, index: int) -> Any:
        driver, kernel = _driver(), launch.kernel
        with self._lock:
            if (kernel, index) in self._functions:
                return self._functions[kernel, index]
            if torch.cuda.is_current_stream_capturing():
                raise KernelError(
                    f"`{kernel.expression}` is not loaded on cuda:{index}, where a CUDA graph is being recorded. A "
                    "load cannot be recorded: project a block of this dtype and batch size once before recording."
                )
            arch = architecture(_capability(index))
            compiled = cubin(kernel, arch)
            result, module = driver.cuModuleLoadData(compiled.image)
            _check(result, f"Loading `{kernel.expression}`, compiled for sm_{arch}, on cuda:{index}")
            result, function = driver.cuModuleGetFunction(module, compiled.name.encode())
            _check(result, f"Finding `{compiled.name}` in its module")
            # More than 48 KiB of shared memory are given only to kernels that ask. 64 KiB is the most that Turing has,
            # and enough for all kernels but one, whose need is the same in every launch.
            attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            wanted = [(attribute, max(2**16, launch.shared_bytes))]
            if launch.shared_bytes > 48 * 2**10:  # take all of the L1 cache, so that a second block fits
                carveout = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT
                wanted.append((carveout, 100))  # per cent
            for attribute, value in wanted:
                (result,) = driver.cuFuncSetAttribute(function, attribute, value)
                _check(result, f"Reserving shared memory for `{kernel.expression}` on cuda:{index}")
            self._functions[kernel, index] = function
            return function


CUDA = CudaRuntime()
"""Process-wide runtime singleton."""


def _make_context_current(index: int) -> None:
    """Give a thread that has not called CUDA yet (autograd's, a user's) the context that torch uses on the device.

    torch sets it with its first call that needs one. Selecting the current device again is no such call.
    """
    driver = _driver()
    result, context = driver.cuCtxGetCurrent()
    _check(result, "Asking for the current CUDA context")
    if int(context):
        return
    result, device = driver.cuDeviceGet(index)
    _check(result, f"Finding cuda:{index}")
    result, context = driver.cuDevicePrimaryCtxRetain(device)  # never released: torch keeps it as long as the process
    _check(result, f"Taking the CUDA context of cuda:{index}")
    (result,) = driver.cuCtxSetCurrent(context)
    _check(result, f"Making the CUDA context of cuda:{index} current")


def workspace(slots: int, out: Tensor) -> Tensor | None:
    """Allocate memory for the partial sums of `out`, or return `None` if a single one is added to `out` itself.

    Raises:
        KernelError: the device has too little memory left; names the size.
    """
    if slots == 1:
        return None
    shape = (slots, *out.shape)
    try:
        return torch.empty(shape, dtype=torch.float32, device=out.device)
    except torch.OutOfMemoryError as error:
        size = 4 * slots * out.numel() / 2**20
        raise KernelError(
            f"{out.device} has no {size:.0f} MiB left for the partial sums of a projection ({slots} parts of shape "
            f"{tuple(out.shape)}). Lower the batch size, or set HF_TRAK_BACKEND=torch, which needs less at a time."
        ) from error


def reduce(runtime: Runtime, out: Tensor, partials: Tensor | None) -> None:
    """Add the partial sums, `out += partials.sum(0)`, in the order of the slots."""
    if partials is None:
        return
    rows, columns = out.shape
    high = -(-rows // _MAX_GRID_Y)
    arguments = ReduceArguments(Destination.of(out, partials), partials.shape[0])
    grid = (-(-columns // REDUCE.threads), -(-rows // high), high)
    runtime.launch(Launch(REDUCE, grid, 0, arguments), out.device)


@cache
def _driver() -> Any:
    try:
        return importlib.import_module("cuda.bindings.driver")
    except ImportError as error:
        raise KernelError(
            f"The bindings of the CUDA driver are not installed ({error}). torch's CUDA wheels bring them: "
            "`pip install cuda-bindings` of the driver's major version, or set HF_TRAK_BACKEND=torch."
        ) from error


@cache
def _capability(index: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(index)


def _index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index


def _check(result: Any, what: str) -> None:
    driver = _driver()
    if result == driver.CUresult.CUDA_SUCCESS:
        return
    explanation = driver.cuGetErrorString(result)[1]
    raise KernelError(
        f"{what} failed: {result.name} ({explanation.decode() if explanation else 'unknown to the driver'}). If the "
        "driver is older than torch's CUDA, update it. HF_TRAK_BACKEND=torch projects without these kernels."
    )
