"""Around the kernels: the cache, the launch, the operators, the choice of the backend, and every error's way out."""

import ctypes
import dataclasses
import importlib
import multiprocessing
import types

import pytest
import torch

from hf_trak.errors import KernelError
from hf_trak.kernels import cache, compiler, ops, runtime
from hf_trak.kernels.arguments import float32_terms, kernels_wanted
from hf_trak.kernels.dense import accumulate_dense, plan_dense
from hf_trak.kernels.sources import REDUCE
from hf_trak.projectors import NormalProjector, ProjectionSink, RademacherProjector, SparseProjector

CUDA = torch.device("cuda", 0)


@pytest.fixture
def cache_directory(tmp_path, monkeypatch):
    monkeypatch.setenv(cache.DIRECTORY_VARIABLE, str(tmp_path / "cubins"))
    try:
        compiler.nvrtc_version()
    except KernelError as error:
        pytest.skip(f"NVRTC is not installed: {error}")
    return tmp_path / "cubins"


def test_cubins_are_compiled_once(cache_directory, monkeypatch):
    first = compiler.cubin(REDUCE, "80")
    (path,) = cache_directory.iterdir()
    monkeypatch.setattr(compiler, "compile_kernel", lambda *_: pytest.fail("compiled twice"))
    again = compiler.cubin(REDUCE, "80")
    assert (again.name, again.image) == (first.name, first.image)
    assert path.name == compiler.name_of(REDUCE, "80")


def test_cache_key_is_everything_a_cubin_depends_on(cache_directory, monkeypatch):
    keys = {compiler.name_of(REDUCE, "80"), compiler.name_of(REDUCE, "86")}
    with monkeypatch.context() as patch:
        patch.setattr(compiler, "nvrtc_version", lambda: (99, 1))
        keys.add(compiler.name_of(REDUCE, "80"))
    with monkeypatch.context() as patch:
        patch.setattr(compiler, "OPTIONS", ("--std=c++20",))
        keys.add(compiler.name_of(REDUCE, "80"))
    with monkeypatch.context() as patch:
        patch.setattr(compiler, "source", lambda file: "other")
        keys.add(compiler.name_of(REDUCE, "80"))
    assert len(keys) == 5


@pytest.mark.parametrize("damage", ["truncate", "flip", "empty", "text"])
def test_damaged_cubins_are_compiled_again(cache_directory, damage):
    """A half-written file never counts."""
    good = compiler.cubin(REDUCE, "80")
    path = cache_directory / compiler.name_of(REDUCE, "80")
    data = path.read_bytes()
    middle = len(data) // 2
    flipped = data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]
    path.write_bytes({"truncate": data[:-7], "flip": flipped, "empty": b"", "text": b"what\n"}[damage])
    assert compiler.cubin(REDUCE, "80").image == good.image
    assert path.read_bytes() == data


def test_a_cache_that_cannot_be_written_is_reported(cache_directory, caplog, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("not a directory")
    monkeypatch.setenv(cache.DIRECTORY_VARIABLE, str(tmp_path / "file" / "below"))
    assert compiler.cubin(REDUCE, "80").image[:4] == b"\x7fELF"
    assert cache.DIRECTORY_VARIABLE in caplog.text


def _compile_in_a_process(directory, barrier, results):
    import os

    os.environ[cache.DIRECTORY_VARIABLE] = directory
    barrier.wait()
    results.put(compiler.cubin(REDUCE, "80").image)


@pytest.mark.slow
def test_many_processes_may_start_at_once(cache_directory):
    context = multiprocessing.get_context("spawn")
    barrier, results = context.Barrier(4), context.Queue()
    workers = [
        context.Process(target=_compile_in_a_process, args=(str(cache_directory), barrier, results)) for _ in range(4)
    ]
    for worker in workers:
        worker.start()
    images = {results.get(timeout=100) for _ in workers}
    for worker in workers:
        worker.join()
    assert len(images) == 1
    assert [path.suffix for path in cache_directory.iterdir()] == [".cubin"]


class FakeDriver:
    """Records what the driver is asked, and answers as told."""

    def __init__(self, failing=None):
        success, failure = types.SimpleNamespace(name="OK"), types.SimpleNamespace(name="CUDA_ERROR_OUT_OF_ROOM")
        self.CUresult = types.SimpleNamespace(CUDA_SUCCESS=success)
        self.CUfunction_attribute = types.SimpleNamespace(
            CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES=8, CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT=9
        )
        self.attributes = {}
        self.context = 77  # of the thread
        self.launched = []
        self.loaded = 0
        self._answer = lambda call: failure if call == failing else success

    def cuCtxGetCurrent(self):  # noqa: N802
        return self._answer("context"), self.context

    def cuDeviceGet(self, index):  # noqa: N802
        return self._answer("device"), f"device {index}"

    def cuDevicePrimaryCtxRetain(self, device):  # noqa: N802
        assert device == "device 0"
        return self._answer("retain"), 78

    def cuCtxSetCurrent(self, context):  # noqa: N802
        self.context = context
        return (self._answer("set"),)

    def CUstream(self, handle):  # noqa: N802 - the driver's name
        return ("stream", handle)

    def cuModuleLoadData(self, image):  # noqa: N802
        assert image[:4] == b"\x7fELF"
        self.loaded += 1
        return self._answer("load"), "module"

    def cuModuleGetFunction(self, module, name):  # noqa: N802
        assert (module, name) == ("module", b"reduce_partials")
        return self._answer("get"), "function"

    def cuFuncSetAttribute(self, function, attribute, value):  # noqa: N802
        assert function == "function"
        self.attributes[attribute] = value
        return (self._answer("attribute"),)

    def cuLaunchKernel(self, function, gx, gy, gz, bx, by, bz, shared, stream, parameters, extra):  # noqa: N802
        pointer = ctypes.cast(parameters, ctypes.POINTER(ctypes.c_void_p))[0]
        slots = ctypes.cast(pointer, ctypes.POINTER(runtime.ReduceArguments))[0].slots
        self.launched.append((function, (gx, gy, gz), (bx, by, bz), shared, stream, extra, slots))
        return (self._answer("launch"),)

    def cuGetErrorString(self, result):  # noqa: N802
        return self.CUresult.CUDA_SUCCESS, b"no room"


@pytest.fixture
def fake_gpu(cache_directory, monkeypatch):
    """One Ampere GPU, as far as `CudaRuntime` can tell; gives a function that installs a driver."""
    guarded = []

    class Guard:
        def __init__(self, index):
            self.index = index

        def __enter__(self):
            guarded.append(self.index)

        def __exit__(self, *_):
            guarded.append(None)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device", Guard)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda index: types.SimpleNamespace(cuda_stream=1234))
    monkeypatch.setattr(runtime, "_capability", lambda index: (8, 0))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)

    def install(failing=None):
        driver = FakeDriver(failing)
        monkeypatch.setattr(runtime, "_driver", lambda: driver)
        return driver, guarded

    return install


def a_launch():
    out = torch.zeros(3, 300)
    arguments = runtime.ReduceArguments(runtime.Destination.of(out, torch.zeros(5, 3, 300)), 5)
    return runtime.Launch(REDUCE, (2, 3, 1), 0, arguments)


def test_launches_use_the_current_stream_under_a_device_guard(fake_gpu):
    driver, guarded = fake_gpu()
    kernels = runtime.CudaRuntime()
    for _ in range(2):
        kernels.launch(a_launch(), CUDA)
    assert driver.loaded == 1
    assert driver.launched == [("function", (2, 3, 1), (256, 1, 1), 0, ("stream", 1234), 0, 5)] * 2
    assert guarded == [0, None, 0, None]
    assert driver.attributes == {8: 2**16}


def test_a_thread_without_a_context_gets_that_of_torch(fake_gpu):
    """As a thread in which torch has not called CUDA; selecting its device again does not give it one."""
    driver, _ = fake_gpu()
    driver.context = 0
    kernels = runtime.CudaRuntime()
    kernels.launch(a_launch(), CUDA)
    assert driver.context == 78 and len(driver.launched) == 1
    driver.context = 77
    kernels.launch(a_launch(), CUDA)
    assert driver.context == 77, "one that is there stays"


def test_what_is_not_loaded_cannot_be_recorded_in_a_graph(fake_gpu, monkeypatch):
    driver, _ = fake_gpu()
    kernels = runtime.CudaRuntime()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(KernelError, match=r"reduce_partials.*CUDA graph.*once before recording"):
        kernels.launch(a_launch(), CUDA)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    kernels.launch(a_launch(), CUDA)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    kernels.launch(a_launch(), CUDA)
    assert len(driver.launched) == 2, "what is loaded can be"


def test_more_shared_memory_than_usual_is_asked_for(fake_gpu):
    """As for tiles of Hopper's products: as much as the launch takes, and the L1 cache's share for a second block."""
    driver, _ = fake_gpu()
    runtime.CudaRuntime().launch(dataclasses.replace(a_launch(), shared_bytes=100_000), CUDA)
    assert driver.attributes == {8: 100_000, 9: 100}


@pytest.mark.parametrize(
    ("failing", "what"),
    [
        ("context", "Asking for the current"),
        ("load", "Loading"),
        ("launch", "The launch of"),
        ("attribute", "Reserving shared memory"),
    ],
)
def test_errors_of_the_driver_name_the_step_and_the_way_out(fake_gpu, failing, what):
    fake_gpu(failing)
    with pytest.raises(KernelError, match=f"(?s){what}.*CUDA_ERROR_OUT_OF_ROOM.*HF_TRAK_BACKEND=torch"):
        runtime.CudaRuntime().launch(a_launch(), CUDA)


def test_missing_nvrtc_and_driver_bindings_are_errors(monkeypatch):
    def missing(name):
        raise ModuleNotFoundError(f"No module named '{name}'")

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(KernelError, match=r"(?s)NVRTC.*not available.*pip install cuda-bindings.*HF_TRAK_BACKEND"):
        compiler._nvrtc.__wrapped__()
    with pytest.raises(KernelError, match="pip install cuda-bindings"):
        runtime._driver.__wrapped__()


def test_out_of_memory_says_how_much_was_asked_for(monkeypatch):
    def full(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch, "empty", full)
    with pytest.raises(KernelError, match=r"no 64 MiB left.*Lower the batch size"):
        runtime.workspace(16, torch.zeros(1, 1).expand(256, 4096))
    assert runtime.workspace(1, torch.zeros(2, 3)) is None


@pytest.mark.parametrize("k", [1, 130, 4096, 16384, 2**24])
@pytest.mark.parametrize("columns", [1, 5000, 10**7, 10**10])
@pytest.mark.parametrize(
    ("distribution", "instruction"), [("rademacher", "mma"), ("rademacher", "wgmma"), ("normal", "fma")]
)
def test_dense_plans_cover_everything_once(distribution, instruction, columns, k):
    plans = [
        plan_dense(distribution, instruction, rows, 2**33 + 3, columns, k, torch.float32, 2)
        for rows in (1, 16, 17, 512)
    ]
    plan = plans[0]
    length = columns + (3 if distribution == "normal" else 0)
    assert (plan.splits - 1) * plan.positions_per_split < length <= plan.splits * plan.positions_per_split
    assert plan.positions_per_split % (32 if instruction == "fma" else 64) == 0, "whole tiles"
    assert plan.splits <= 512 and plan.column_groups * (256 if distribution == "rademacher" else 128) >= k
    assert plan.splits * min(k, 2**17) * 4 <= 2**20, "workspace per sample"
    assert all(other.positions_per_split == plan.positions_per_split for other in plans), "cuts ignore the batch"
    assert max(other.shared_bytes for other in plans) <= (227 * 2**10 if instruction == "wgmma" else 2**16)


def test_large_batches_go_in_slices():
    """So that the workspace stays bounded: rows 0 … 511, then the others."""
    seen = []

    class Recorder:
        def capability(self, device):
            return (8, 0)

        def launch(self, launch, device):
            seen.append((launch.kernel.file, launch.arguments.to.rows))

    accumulate_dense(Recorder(), "rademacher", torch.zeros(700, 4), torch.zeros(700, 8), 0, 0, 0, 2)
    assert seen == [("rademacher", 512), ("rademacher", 188)]


def test_backend_is_chosen_by_device_and_variable(monkeypatch):
    monkeypatch.delenv("HF_TRAK_BACKEND", raising=False)
    monkeypatch.setattr(torch.version, "hip", None)
    assert kernels_wanted(CUDA) and not kernels_wanted(torch.device("cpu"))
    monkeypatch.setenv("HF_TRAK_BACKEND", "torch")
    assert not kernels_wanted(CUDA)
    monkeypatch.setenv("HF_TRAK_BACKEND", "cuda")
    assert kernels_wanted(CUDA) and not kernels_wanted(torch.device("cpu"))
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert not kernels_wanted(CUDA)
    monkeypatch.setenv("HF_TRAK_BACKEND", "tensorflow")
    with pytest.raises(ValueError, match=r"HF_TRAK_BACKEND is 'tensorflow'\. Expected one of auto, cuda, torch"):
        kernels_wanted(CUDA)


def test_float32_terms_are_two_unless_set(monkeypatch):
    monkeypatch.delenv("HF_TRAK_FLOAT32_TERMS", raising=False)
    assert float32_terms() == 2
    monkeypatch.setenv("HF_TRAK_FLOAT32_TERMS", "1")
    assert float32_terms() == 1
    monkeypatch.setenv("HF_TRAK_FLOAT32_TERMS", "3")
    with pytest.raises(ValueError, match="Expected 1 or 2"):
        float32_terms()


OPERATORS = [("sjlt", (2,)), ("rademacher", (2,)), ("normal", ())]


@pytest.mark.parametrize(("name", "more"), OPERATORS)
def test_operators_are_registered_properly(name, more):
    operator = getattr(torch.ops.hf_trak, f"{name}_accumulate").default
    torch.library.opcheck(operator, (torch.randn(3, 40), torch.randn(3, 100), 5, 1, 2, *more))


@pytest.mark.parametrize(("name", "more"), OPERATORS)
def test_operators_on_the_cpu_are_the_reference(name, more):
    block, out = torch.randn(3, 100), torch.ones(3, 40)
    projector = {"sjlt": SparseProjector, "rademacher": RademacherProjector, "normal": NormalProjector}[name]
    options = {"nonzeros": 2} if name == "sjlt" else {}
    expected = out.clone()
    projector(105, 40, 1, **options).accumulate(expected, block, 5, 2)
    getattr(torch.ops.hf_trak, f"{name}_accumulate")(out, block, 5, 1, 2, *more)
    assert torch.equal(out, expected)


@pytest.mark.parametrize("name", ["sjlt", "rademacher", "normal"])
def test_projectors_call_the_operators_where_kernels_are_wanted(name, monkeypatch):
    """On a CPU, told that kernels are wanted, the operator's CPU implementation runs, of another projector."""
    from hf_trak.projectors import base, make_projector
    from hf_trak.projectors import dense as sparse

    projector = make_projector(name, 300, 20, 5, "cpu")
    block = torch.randn(2, 300)
    expected = projector.project(block, 1)
    calls = []
    inner = projector._accumulate_with_kernels
    monkeypatch.setattr(projector, "_accumulate", lambda *_: pytest.fail("not the operator"))
    monkeypatch.setattr(ops, "launch_sjlt", ops.sjlt_accumulate)
    wanted = [True]  # only for the outer call
    for module in (base, sparse):
        monkeypatch.setattr(module, "kernels_wanted", lambda device: bool(wanted))

    def once(*arguments):
        calls.append(wanted.pop())
        inner(*arguments)
        wanted.append(True)

    monkeypatch.setattr(projector, "_accumulate_with_kernels", once)
    assert type(projector.sink(2, 1, "cpu")) is ProjectionSink
    assert torch.allclose(projector.project(block, 1), expected, atol=1e-4)
    assert len(calls) == 1
