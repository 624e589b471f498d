"""Runs the kernels of `cuda_ext/` on a CPU, thread by thread: see `cuda_on_cpu.h`. Needs g++."""

import ctypes
import shutil
import subprocess
from pathlib import Path

import torch

from hf_trak.kernels.runtime import Launch
from hf_trak.kernels.sources import Kernel, parts, source_directory

STAND_INS = {name: Path(__file__).with_name(f"{name}_on_cpu.h") for name in ("cuda", "wgmma")}
"""In place of `primitives.cu`, which comes first, and of `wgmma.cu`."""

SHARED_BYTES = {(9, 0): 232_448}
"""What a block of threads may have; elsewhere 64 KiB, the most that Turing has."""

_ENTRY = """
extern "C" int run(const unsigned* grid, size_t threads, size_t shared_bytes, unsigned seed, const void* arguments) {{
    return emulator::run(grid, threads, shared_bytes, seed, [&] {{
        {call};
    }});
}}
"""


def compiler() -> str | None:
    """The C++ compiler, or `None`."""
    return shutil.which("g++")


class EmulatedRuntime:
    """A [`hf_trak.kernels.runtime.Runtime`] whose device memory is that of CPU tensors."""

    def __init__(self, directory: Path, capability: tuple[int, int] = (8, 0), seed: int = 0) -> None:
        """
        Args:
            directory: for compiled kernels.
            capability: of the GPU that is played.
            seed: of the order in which threads run, and of when asynchronous products are carried out.
        """
        self.directory = directory
        self.seed = seed
        self.launches: list[Launch] = []
        self._capability = capability
        self._functions: dict[Kernel, ctypes._CFuncPtr] = {}

    def capability(self, device: torch.device) -> tuple[int, int]:
        return self._capability

    def launch(self, launch: Launch, device: torch.device) -> None:
        assert launch.kernel.runs_on(self._capability)
        assert launch.shared_bytes <= SHARED_BYTES.get(self._capability, 2**16), "more shared memory than there is"
        assert all(size >= 1 for size in launch.grid) and max(launch.grid[1:]) <= 65535
        self.launches.append(launch)
        grid = (ctypes.c_uint * 3)(*launch.grid)
        function = self._functions.get(launch.kernel) or self._compile(launch.kernel, type(launch.arguments).__name__)
        failed = function(
            grid,
            ctypes.c_size_t(launch.kernel.threads),
            ctypes.c_size_t(launch.shared_bytes),
            ctypes.c_uint(self.seed),
            ctypes.byref(launch.arguments),
        )
        assert not failed, f"{launch.kernel.expression}: some threads wait for others that never come"

    def _compile(self, kernel: Kernel, arguments: str) -> ctypes._CFuncPtr:
        name = "".join(c if c.isalnum() else "_" for c in kernel.expression)
        library = self.directory / f"{name}.so"
        if not library.exists():
            program = self.directory / f"{name}.cpp"
            files = [STAND_INS["cuda"], *(source_directory() / name for name in parts(kernel.file)[1:])]
            texts = [(STAND_INS["wgmma"] if file.name == "wgmma.cu" else file).read_text() for file in files]
            call = f"{kernel.expression}(*static_cast<const {arguments}*>(arguments))"
            program.write_text("\n".join(texts) + _ENTRY.format(call=call))
            command = [
                str(compiler()),
                "-std=c++17",
                "-O1",
                "-w",
                "-shared",
                "-fPIC",
                "-o",
                str(library),
                str(program),
            ]
            subprocess.run(command, check=True)
        self._functions[kernel] = ctypes.CDLL(str(library)).run
        return self._functions[kernel]
