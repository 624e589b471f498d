"""Compile every kernel ahead of time, for the cache of this machine or to see the compilers' reports.

    python -m hf_trak.kernels.build                      # for the GPUs of this machine, or without one for all
    python -m hf_trak.kernels.build --arch 90a --arch 100
    python -m hf_trak.kernels.build --arch 90a --nvcc nvcc

A job that starts a thousand processes runs the first line once before. `--nvcc` compiles with nvcc instead, as a
second opinion, and keeps nothing.
"""

import argparse
import re
import shutil
import subprocess
import sysconfig
import tempfile
from pathlib import Path

import torch

from hf_trak.errors import KernelError
from hf_trak.kernels.compiler import Resources, architecture, compile_kernel, nvrtc_version, path_of, resources, write
from hf_trak.kernels.sources import ARCHITECTURES, VOLTA, Kernel, all_kernels, source


def capability_of(arch: str) -> tuple[int, int]:
    """Turn an architecture into a compute capability: `90a` into (9, 0)."""
    number = int(arch.rstrip("af"))
    return number // 10, number % 10


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


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m hf_trak.kernels.build",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--arch", action="append", help="architecture without `sm_`, such as 90a; may be repeated")
    parser.add_argument("--nvcc", help="path of nvcc, to compile with it instead of NVRTC")
    return parser.parse_args(arguments)


def _own_architectures() -> list[str]:
    count = torch.cuda.device_count()
    return sorted({architecture(torch.cuda.get_device_capability(index)) for index in range(count)})


def _all_architectures() -> list[str]:
    return [*([VOLTA] if nvrtc_version() < (13, 0) else []), *ARCHITECTURES]


def _show(kernel: Kernel, arch: str, found: Resources) -> None:
    print(
        f"sm_{arch:5} {kernel.expression:40} {found.registers:4} registers, {found.stack_bytes:3} bytes of stack, "
        f"{found.spill_bytes:3} bytes spilled",
        flush=True,
    )


def main(arguments: list[str] | None = None) -> None:
    """Run the command, see the module's docstring."""
    args = _parse(arguments)
    for arch in args.arch or _own_architectures() or _all_architectures():
        kernels = [kernel for kernel in all_kernels() if kernel.runs_on(capability_of(arch))]
        if args.nvcc:
            for file in dict.fromkeys(kernel.file for kernel in kernels):
                group = [kernel for kernel in kernels if kernel.file == file]
                for kernel, found in compile_with_nvcc(group, arch, args.nvcc).items():
                    _show(kernel, arch, found)
            continue
        for kernel in kernels:
            compiled = compile_kernel(kernel, arch)
            write(path_of(kernel, arch), compiled)
            _show(kernel, arch, resources(compiled.log))


if __name__ == "__main__":
    main()
