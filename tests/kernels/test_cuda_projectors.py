"""`CudaProjector`, `ChunkedCudaProjector` and `FastJlProjector`: names of the `trak` API, and another backend."""

import sys
import types

import pytest
import torch

from hf_trak.errors import NonFiniteError
from hf_trak.projectors import (
    ChunkedCudaProjector,
    CudaProjector,
    FastJlProjector,
    NormalProjector,
    RademacherProjector,
    cuda,
)


@pytest.mark.parametrize(("proj_type", "dense"), [("rademacher", RademacherProjector), ("normal", NormalProjector)])
def test_cuda_projector_is_the_dense_map(proj_type, dense):
    projector = CudaProjector(50, 12, 3, proj_type, "cuda:0", 32)
    expected = dense(50, 12, 3)
    assert (projector.algorithm, projector.scale) == (expected.algorithm, expected.scale)
    block, out, reference = torch.randn(40, 50), torch.zeros(40, 12), torch.zeros(40, 12)
    projector.accumulate(out, block, 0, 1)  # works wherever its tensors are
    expected.accumulate(reference, block, 0, 1)
    assert torch.equal(out, reference)
    projector.free_memory()


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((10, 4, 0, "rademacher", "cpu", 8), ValueError, "needs a CUDA device"),
        ((10, 4, 0, "uniform", "cuda", 8), ValueError, "Expected 'rademacher' or 'normal'"),
        ((10, 4, 0, "normal", "cuda", 0), ValueError, "max_batch_size"),
        ((0, 4, 0, "normal", "cuda", 8), ValueError, "grad_dim"),
    ],
)
def test_cuda_projector_says_what_is_wrong(arguments, error, message):
    with pytest.raises(error, match=message):
        CudaProjector(*arguments)


@pytest.fixture
def on_cpu(monkeypatch):
    """Lets the chunked projector take CPU tensors."""
    monkeypatch.setattr(cuda, "check_cuda", lambda cls, device: None)


def chunks(sizes, dtype=torch.float32, batch=4):
    projectors = [RademacherProjector(size, 6, seed) for seed, size in enumerate(sizes)]
    return ChunkedCudaProjector(projectors, max(sizes), sizes, batch, "cpu", dtype), projectors


def test_chunks_add_up(on_cpu):
    sizes = [7, 30, 1, 12]
    chunked, projectors = chunks(sizes)
    grads = torch.randint(-9, 10, (4, sum(sizes))).float()
    expected = sum(p.project(g, 2) for p, g in zip(projectors, grads.split(sizes, 1), strict=True))
    mapping = {"a": grads[:, :3].view(4, 1, 3), "b": grads[:, 3:40], "c": grads[:, 40:]}
    for _ in range(2):
        assert torch.equal(chunked.project(grads, 2), expected)
        assert torch.equal(chunked.project(mapping, 2), expected)
        chunked.free_memory()  # the next call works all the same


def test_chunks_of_projectors_without_blocks_go_through_the_buffer(on_cpu):
    class Sums:
        grad_dim, proj_dim, proj_type = 5, 2, "sums"

        def project(self, grads, model_id):
            assert grads.shape[1] == 5 and grads.is_contiguous()
            return grads.sum(1, keepdim=True).expand(-1, 2)

        def free_memory(self):
            pass

    chunked = ChunkedCudaProjector([Sums(), Sums()], 5, [5, 5], 3, "cpu", torch.float32)
    chunked.allocate_input()
    grads = torch.arange(20.0).view(2, 10)
    assert torch.equal(
        chunked.project({"a": grads[:, :3], "b": grads[:, 3:]}, 0), grads.sum(1, keepdim=True).expand(2, 2)
    )
    chunked.free_memory()
    assert torch.equal(chunked.project(grads[:1], 0), grads[:1].sum(1, keepdim=True).expand(1, 2))


def test_chunked_projector_says_what_is_wrong(on_cpu):
    chunked, projectors = chunks([7, 3])
    with pytest.raises(ValueError, match=r"4 × 9 on cpu.*4 × 10"):
        chunked.project(torch.zeros(4, 9), 0)
    with pytest.raises(ValueError, match="at most 4"):
        chunked.project(torch.zeros(5, 10), 0)
    with pytest.raises(NonFiniteError, match="row 1"):
        chunked.project(torch.tensor([[1.0] * 10, [float("nan")] * 10]), 0)
    with pytest.raises(ValueError, match="2 projectors for 1 chunks"):
        ChunkedCudaProjector(projectors, 10, [7], 4, "cpu", torch.float32)
    with pytest.raises(ValueError, match="Chunk 0 has 7 parameters"):
        ChunkedCudaProjector(projectors, 6, [7, 3], 4, "cpu", torch.float32)
    with pytest.raises(ValueError, match="different `proj_dim`"):
        ChunkedCudaProjector([projectors[0], RademacherProjector(3, 5)], 7, [7, 3], 4, "cpu", torch.float32)


def test_chunked_projector_needs_a_cuda_device():
    with pytest.raises(ValueError, match="needs a CUDA device"):
        ChunkedCudaProjector([], 10, [10], 8, "cpu", torch.float32)


def test_fast_jl_is_called_by_name_and_warns(monkeypatch):
    """Its map depends on the GPU model, and it says so."""
    calls = []

    def project(grads, proj_dim, seed, multiprocessors):
        calls.append((tuple(grads.shape), proj_dim, seed, multiprocessors))
        return torch.zeros(grads.shape[0], proj_dim)

    names = [f"project_rademacher_{size}" for size in (8, 16, 32)]
    monkeypatch.setitem(sys.modules, "fast_jl", types.SimpleNamespace(**dict.fromkeys(names, project)))
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda _: types.SimpleNamespace(multi_processor_count=132)
    )
    monkeypatch.setattr(torch.cuda, "device", lambda _: torch.no_grad())
    with pytest.warns(UserWarning, match="depends on the GPU model"):
        projector = FastJlProjector(10, 512, 3, "rademacher", "cuda", 16)
    projector.project({"a": torch.zeros(9, 4), "b": torch.zeros(9, 6)}, 2)
    assert calls == [((9, 10), 512, 20_003, 132)]
    with pytest.raises(ValueError, match="grad_dim=10"):
        projector.project(torch.zeros(9, 11), 2)


def test_fast_jl_says_what_is_wrong(monkeypatch):
    monkeypatch.setitem(sys.modules, "fast_jl", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install fast-jl"):
        FastJlProjector(10, 512, 0, "normal", "cuda")
    for arguments, message in [
        ((10, 500, 0, "normal", "cuda"), "multiples of 512"),
        ((10, 512, 0, "normal", "cpu"), "needs a CUDA device"),
        ((10, 512, 0, "normal", "cuda", 40), "Expected one of"),
        ((10, 512, 0, "uniform", "cuda"), "Expected 'rademacher' or 'normal'"),
    ]:
        with pytest.raises(ValueError, match=message):
            FastJlProjector(*arguments)
