"""Every kernel compiles for every architecture, by NVRTC and by nvcc, and keeps its variables in registers."""

import importlib.util
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from nvcc import compile_with_nvcc, find_nvcc

from hf_trak.errors import KernelError
from hf_trak.kernels import build, compiler
from hf_trak.kernels.sources import ARCHITECTURES, VOLTA, Kernel, all_kernels, source, source_directory

# Of each file the instances with the most registers. The rest is compiled by the long tests.
SHORT_LIST = [
    "reduce_partials",
    "hadamard",
    "sjlt<BFloat16>",
    "outer<Float32, 8>",
    "rademacher<BFloat16, 1, 128>",
    "rademacher<Float32, 2, 64>",
    "rademacher_wgmma<BFloat16, 1, 128>",
    "rademacher_wgmma<Float32, 2, 128>",
    "dense<Float32, Normal, 64>",
]


def kernels_for(arch, names=None):
    return [
        kernel
        for kernel in all_kernels()
        if kernel.runs_on(build.capability_of(arch)) and (names is None or kernel.expression in names)
    ]


def check_with_nvrtc(arch, kernels):
    if arch == VOLTA and compiler.nvrtc_version() >= (13, 0):
        pytest.skip("compute capability 7.0 needs NVRTC of CUDA 12")
    for kernel in kernels:
        compiled = compiler.compile_kernel(kernel, arch)
        assert compiled.image[:4] == b"\x7fELF"
        found = compiler.resources(compiled.log)
        assert found.spill_bytes == 0, (kernel, arch, found)
        assert found.registers <= 65536 // kernel.threads
        assert "serialized" not in compiled.log, "asynchronous products that wait for each other"


@pytest.fixture(scope="module", autouse=True)
def _nvrtc():
    try:
        compiler.nvrtc_version()
    except KernelError as error:
        pytest.skip(f"NVRTC is not installed: {error}")


@pytest.mark.slow
def test_kernels_compile_without_spills():
    check_with_nvrtc("90a", kernels_for("90a", SHORT_LIST))


@pytest.mark.slow
@pytest.mark.parametrize("arch", [VOLTA, *ARCHITECTURES])
def test_every_kernel_compiles_without_spills(arch):
    check_with_nvrtc(arch, kernels_for(arch))


def disassembler():
    """triton, which torch's CUDA wheels need, brings nvdisasm."""
    spec = importlib.util.find_spec("triton")
    found = Path(spec.origin).parent / "backends/nvidia/bin/nvdisasm" if spec else None
    return str(found) if found and found.is_file() else shutil.which("nvdisasm")


@pytest.mark.slow
@pytest.mark.parametrize("expression", ["rademacher_wgmma<BFloat16, 1, 128>", "rademacher_wgmma<Float32, 2, 128>"])
def test_products_of_hopper_stay_in_flight(expression, tmp_path):
    """Only the end of a chain waits for all; in the loop one step is multiplied while the next is made."""
    nvdisasm = disassembler()
    if nvdisasm is None:
        pytest.skip("nvdisasm is not installed")
    (kernel,) = kernels_for("90a", [expression])
    (tmp_path / "kernel.cubin").write_bytes(compiler.compile_kernel(kernel, "90a").image)
    code = subprocess.run(
        [nvdisasm, "-c", tmp_path / "kernel.cubin"], capture_output=True, text=True, check=True
    ).stdout
    waits = re.findall(r"WARPGROUP\.DEPBAR\.LE gsb0, (0x\w+)", code)
    assert sorted(waits) == ["0x0", *["0x1"] * 4]
    products = re.findall(r"HGMMA\.64x128x16\.F32\.BF16 (R\d+), (R\d+)", code)
    terms = 2 if "Float32" in expression else 1
    assert len(products) == 4 * 2 * terms
    assert len({signs for _, signs in products}) == 4 and len({sums for sums, _ in products}) == 2, "two sets of signs"


def check_with_nvcc(arch, kernels):
    nvcc = find_nvcc()
    if nvcc is None:
        pytest.skip("nvcc is not installed (`pip install nvidia-cuda-nvcc` brings it)")
    for file in sorted({kernel.file for kernel in kernels}):
        group = [kernel for kernel in kernels if kernel.file == file]
        found = compile_with_nvcc(group, arch, nvcc)
        assert found.keys() == set(group)
        assert all(report.spill_bytes == 0 for report in found.values()), (arch, found)


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["80", "90a"])
def test_every_kernel_compiles_with_nvcc(arch):
    """NVRTC, which has the same compiler, compiles for the other architectures."""
    check_with_nvcc(arch, kernels_for(arch))


def test_sources_include_nothing():
    files = sorted(source_directory().glob("*.cu"))
    assert {kernel.file for kernel in all_kernels()} <= {path.stem for path in files}
    assert not any("#include" in path.read_text() for path in files)


def test_compile_errors_show_the_log_and_the_way_out():
    with pytest.raises(KernelError, match=r"(?s)no_such_kernel.*sm_80.*HF_TRAK_BACKEND=torch.*error"):
        compiler.compile_kernel(Kernel("reduce", "no_such_kernel<float>", 256), "80")


def test_architecture_is_the_newest_that_runs():
    assert compiler.architecture((9, 0)) == "90a"
    assert compiler.architecture((8, 6)) == "86"
    assert compiler.architecture((12, 9)) == "121" or compiler.architecture((12, 9)).startswith("12")
    with pytest.raises(KernelError, match=r"capability 3\.5.*HF_TRAK_BACKEND=torch"):
        compiler.architecture((3, 5))
    with pytest.raises(KernelError, match=r"capability 99\.0"):
        compiler.architecture((99, 0))


def test_resources_come_from_the_log():
    log = "16 bytes stack frame, 20 bytes spill stores, 48 bytes spill loads\nptxas info    : Used 255 registers, used"
    assert compiler.resources(log) == compiler.Resources(255, 16, 68)
    with pytest.raises(ValueError, match="Expected one report"):
        compiler.resources("nothing")


def test_build_command_compiles_for_volta_where_cuda_does(monkeypatch):
    for version, volta in (((12, 9), True), ((13, 0), False)):
        monkeypatch.setattr(build, "nvrtc_version", lambda version=version: version)
        assert (VOLTA in build._all_architectures()) == volta
    assert not any(kernel.file == "rademacher" for kernel in kernels_for(VOLTA)), "no bfloat16 there"
    for arch in ARCHITECTURES:
        assert any(kernel.file == "rademacher_wgmma" for kernel in kernels_for(arch)) == (arch == "90a")


def test_build_command_fills_the_cache(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HF_TRAK_KERNEL_CACHE", str(tmp_path))
    chosen = kernels_for("80", ["reduce_partials"])
    monkeypatch.setattr(build, "all_kernels", lambda: chosen)
    build.main(["--arch", "80", "--arch", "120"])
    assert len(list(tmp_path.glob("reduce-sm_*.cubin"))) == 2
    assert capsys.readouterr().out.count("0 bytes spilled") == 2
    assert source("reduce").startswith("//")
