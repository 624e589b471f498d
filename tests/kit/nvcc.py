"""Compile kernels with nvcc, a second opinion beside NVRTC's."""

import re
import shutil
import subprocess
import sysconfig
import tempfile
from pathlib import Path

from hf_trak.errors import KernelError
from hf_trak.kernels.compiler import Resources, resources
from hf_trak.kernels.sources import Kernel, source


def find_nvcc() -> str | None:
    """Find nvcc on the path or in the package `nvidia-cuda-nvcc`; return `None` if neither has one."""
    packaged = sorted(Path(sysconfig.get_path("purelib")).glob("nvidia/*/bin/nvcc"))
    return shutil.which("nvcc") or (str(packaged[-1]) if packaged else None)


def compile_with_nvcc(kernels: list[Kernel], arch: str, nvcc: str) -> dict[Kernel, Resources]:
    """Compile instances of one file's templates with nvcc.

    Args:
        kernels: kernels of one file.
        arch: the architecture, such as `90a`.
        nvcc: path of the compiler.

    Raises:
        KernelError: nvcc refuses the program; shows its output.
    """
    (file,) = {kernel.file for kernel in kernels}
    text = source(file)
    arguments = {"sjlt": "SjltArguments", "outer": "OuterArguments"}.get(file, "DenseArguments")
    for kernel in kernels:
        if "<" in kernel.expression:
            text += f"\ntemplate __global__ void {kernel.expression}(const __grid_constant__ {arguments});"
    with tempfile.TemporaryDirectory() as directory:
        program = Path(directory) / f"{file}.cu"
        program.write_text(text + "\n", encoding="utf-8")
        target = f"-gencode=arch=compute_{arch},code=sm_{arch}"
        command = [nvcc, "-std=c++17", target, "-cubin", "-Xptxas", "-v", "-o", f"{directory}/out", str(program)]
        done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise KernelError(
            f"nvcc does not compile {file}.cu for sm_{arch}. Expected a toolkit that knows this architecture. The "
            f"command was `{' '.join(command)}`, its output:\n{done.stdout}{done.stderr}"
        )
    reports = re.split(r"(?=Compiling entry function)", done.stderr)[1:]
    found = {_mangled(kernel): kernel for kernel in kernels}
    return {
        kernel: resources(report)
        for report in reports
        for name, kernel in found.items()
        if re.search(rf"entry function '{name}", report)
    }


def _mangled(kernel: Kernel) -> str:
    """Return the beginning of a kernel's name in machine code (Itanium ABI): types and integers, in order."""
    name, _, parameters = kernel.expression.partition("<")
    if not parameters:
        return f"{name}'"
    encoded = "".join(
        f"Li{parameter}E" if parameter.isdigit() else f"{len(parameter)}{parameter}"
        for parameter in re.findall(r"\w+", parameters)
    )
    return f"_Z{len(name)}{name}I{encoded}E"
