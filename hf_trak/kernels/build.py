"""Compile every kernel ahead of time, for the cache of this machine or to see the compilers' reports.

    python -m hf_trak.kernels.build                      # for the GPUs of this machine, or without one for all
    python -m hf_trak.kernels.build --arch 90a --arch 100

A job that starts a thousand processes runs the first line once before.
"""

import argparse

import torch

from hf_trak.kernels import cache
from hf_trak.kernels.compiler import Resources, architecture, compile_kernel, name_of, nvrtc_version, packed, resources
from hf_trak.kernels.sources import ARCHITECTURES, VOLTA, Kernel, all_kernels


def capability_of(arch: str) -> tuple[int, int]:
    """Turn an architecture into a compute capability: `90a` into (9, 0)."""
    number = int(arch.rstrip("af"))
    return number // 10, number % 10


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("python -m hf_trak.kernels.build", description=__doc__, formatter_class=raw)
    parser.add_argument("--arch", action="append", help="architecture without `sm_`, such as 90a; may be repeated")
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
        for kernel in [kernel for kernel in all_kernels() if kernel.runs_on(capability_of(arch))]:
            compiled = compile_kernel(kernel, arch)
            cache.write(name_of(kernel, arch), packed(compiled))
            _show(kernel, arch, resources(compiled.log))


if __name__ == "__main__":
    main()
