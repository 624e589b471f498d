"""Tensors between host and device: what arrives, in which order, and which memory is used again when."""

import itertools
from collections import deque

import pytest
import torch
from rounding import assert_within, product_bound

from hf_trak.runtime import transfers
from hf_trak.runtime.transfers import BUFFERS, download, uploaded
from hf_trak.scores import streaming
from hf_trak.scores.streaming import score_blocks, uploaded_shards
from hf_trak.store.shard_set import Shard
from hf_trak.traker.score_computers import BasicScoreComputer, product_through_device
from hf_trak.utils import get_matrix_mult_blockwise

CPU = torch.device("cpu")


class LateEngine:
    """Copies as late as is allowed: in order, and only when somebody waits for one. What is not there yet is NaN.

    A buffer that is written before the copy out of it, a result that is read before the copy into it, or a source that
    is changed too early shows in the values.
    """

    def __init__(self):
        self.queue = deque()
        self.buffers = []
        self.most_waiting = 0

    def pinned(self, size):
        self.buffers.append(torch.full((size,), 255, dtype=torch.uint8))
        return self.buffers[-1]

    def upload(self, source):
        assert self._is_pinned(source)
        target = torch.full_like(source, float("nan"))
        return target, self._enqueue(target, source)

    def download(self, source, target):
        assert self._is_pinned(target)
        return self._enqueue(target, source)

    def _is_pinned(self, tensor):
        return not tensor.numel() or any(tensor.data_ptr() == buffer.data_ptr() for buffer in self.buffers)

    def _enqueue(self, target, source):
        copy = LateCopy(self, target, source)
        self.queue.append(copy)
        self.most_waiting = max(self.most_waiting, len(self.queue))
        return copy


class LateCopy:
    def __init__(self, engine, target, source):
        self.engine = engine
        self.target = target
        self.source = source

    def wait(self):
        while self in self.engine.queue:
            copy = self.engine.queue.popleft()
            copy.target.copy_(copy.source)

    synchronize = wait


@pytest.fixture
def engine(monkeypatch):
    """The CPU with an engine of its own."""
    engine = LateEngine()
    monkeypatch.setattr(transfers, "copy_engine", lambda device: engine)
    return engine


SHAPES = [(3, 4), (5, 4), (1, 4), (0, 4), (7, 4), (2, 4)]


@pytest.mark.parametrize("count", [0, 1, 2, 6])
def test_uploads_arrive_in_order(engine, count):
    sources = [torch.randn(shape) for shape in SHAPES[:count]]
    expected = [source.clone() for source in sources]
    read = []

    def tensors():
        for index, source in enumerate(sources):
            read.append(index)
            yield source
            source.fill_(float("nan"))  # whoever gives it may use its memory again

    for index, tensor in enumerate(uploaded(tensors(), CPU)):
        assert torch.equal(tensor, expected[index])
        assert len(read) == min(count, index + BUFFERS), "the next one is on its way"
    assert len(read) == count
    assert len(engine.buffers) <= 2 * BUFFERS  # each grows once here


def test_uploads_of_views_and_dtypes(engine):
    source = torch.arange(60.0).view(6, 10)[:, ::3]
    sources = [source, source.T, source.to(torch.float16), source.to(torch.bfloat16).T, source.double()]
    for tensor, expected in zip(uploaded(sources, CPU), sources, strict=True):
        assert tensor.dtype == expected.dtype and torch.equal(tensor, expected)


@pytest.mark.parametrize("count", [0, 1, 2, 6])
def test_downloads_arrive_where_they_belong(engine, count):
    whole = torch.full((20, 8), -1.0)
    bounds = list(itertools.accumulate((shape[0] for shape in SHAPES[:count]), initial=0))
    targets = [whole[low:high, 2:6] for low, high in itertools.pairwise(bounds)]
    sources = [torch.randn(shape) for shape in SHAPES[:count]]
    expected = whole.clone()
    for source, (low, high) in zip(sources, itertools.pairwise(bounds), strict=True):
        expected[low:high, 2:6] = source
    download(zip(sources, targets, strict=True), CPU)
    assert torch.equal(whole, expected)
    assert not engine.queue
    assert engine.most_waiting == min(count, BUFFERS), "copies wait while others are computed"


def test_errors_of_the_source_come_through(engine):
    def failing():
        yield torch.zeros(2)
        raise ValueError("no more")

    with pytest.raises(ValueError, match="no more"):
        list(uploaded(failing(), CPU))
    with pytest.raises(ValueError, match="no more"):
        download(((tensor, torch.zeros(2)) for tensor in failing()), CPU)


def test_a_cpu_copies_nothing_beforehand():
    source = torch.randn(3, 4)
    read = []

    def tensors():
        for index in range(3):
            read.append(index)
            yield source

    first = next(uploaded(tensors(), CPU))
    assert first is source and read == [0], "no shard is read before it is needed"


@pytest.mark.parametrize(("n", "m", "size"), [(1, 1, 1), (10, 7, 3), (9, 4, 3), (5, 5, 100)])
def test_products_through_a_device(engine, n, m, size):
    features, targets = torch.randn(n, 6, dtype=torch.float16), torch.randn(m, 6, dtype=torch.float16)
    expected = features.double() @ targets.double().T
    bound = product_bound(features, targets.T)  # 6 products
    product = product_through_device(features, targets, CPU, size)
    assert_within(product, expected, bound)
    blockwise = get_matrix_mult_blockwise(features, targets, torch.float32, size)
    assert_within(blockwise, expected, bound)
    assert product.dtype == blockwise.dtype == torch.float32
    assert engine.most_waiting > 0


def test_score_computer_gives_the_same_through_copies(monkeypatch):
    features = torch.randn(50, 8)

    def results():
        computer = BasicScoreComputer(torch.float32, "cpu", CUDA_MAX_DIM_SIZE=7)
        gram = computer.get_xtx(features)
        return gram, computer.get_x_xtx_inv(features, gram)

    expected = results()
    engine = LateEngine()
    monkeypatch.setattr(transfers, "copy_engine", lambda device: engine)
    for actual, right in zip(results(), expected, strict=True):
        assert torch.equal(actual, right)
    assert engine.most_waiting > 0


def shards_of(features, q, size):
    return [
        Shard(start, min(start + size, len(features)), features[start : start + size], q[start : start + size])
        for start in range(0, len(features), size)
    ]


def test_shards_arrive_in_order(monkeypatch):
    features, q = torch.randn(23, 8, dtype=torch.float16), torch.randn(23)
    shards = shards_of(features, q, 5)
    engine = LateEngine()
    for arrived, shard in zip(uploaded_shards(iter(shards), CPU, engine), shards, strict=True):
        assert (arrived.start, arrived.stop) == (shard.start, shard.stop)
        assert torch.equal(arrived.grads, shard.grads) and arrived.grads is not shard.grads
        assert arrived.out_to_loss is shard.out_to_loss
    assert engine.most_waiting == BUFFERS
    assert list(uploaded_shards(iter(shards), CPU)) == shards, "as they are where nothing has to be copied"


def test_streamed_scores_are_the_same_through_copies(monkeypatch):
    """Several checkpoints, whose shards are uploaded side by side."""
    features, q, targets = torch.randn(2, 23, 8), torch.randn(2, 23), torch.randn(2, 3, 8)

    def scores():
        shards = [shards_of(features[c], q[c], 5) for c in range(2)]
        return torch.cat([block for _, _, block in score_blocks(shards, list(targets))])

    expected = scores()
    engine = LateEngine()
    monkeypatch.setattr(streaming, "copy_engine", lambda device: engine)
    assert torch.equal(scores(), expected)
    assert engine.most_waiting > BUFFERS, "of both checkpoints"


# ---- On a GPU ----

gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


class TestOnGpu:
    pytestmark = gpu

    def test_what_goes_up_comes_down(self):
        """Many blocks of different sizes, worked on while others are copied."""
        device = torch.device("cuda", torch.cuda.current_device())
        sources = [torch.randn(2**14 + 977 * index, 300) for index in range(12)]
        results = [torch.empty_like(source) for source in sources]

        def worked_on():
            for tensor in uploaded(sources, device):
                value = tensor
                for _ in range(20):
                    value = value * 2 - tensor
                yield value, results[len(done)]
                done.append(None)

        done = []
        download(worked_on(), device)
        for source, result in zip(sources, results, strict=True):
            torch.testing.assert_close(result, source, rtol=0, atol=1e-1)

    def test_scores_of_host_features_equal_those_of_the_cpu(self):
        features, targets = torch.randn(3000, 64), torch.randn(100, 64)
        on_gpu, on_cpu = (BasicScoreComputer(torch.float32, device, 512) for device in ("cuda", "cpu"))
        results = []
        for computer in (on_gpu, on_cpu):
            gram = computer.get_xtx(features)
            accumulator = torch.zeros(3000, 100)
            computer.get_scores(computer.get_x_xtx_inv(features, gram).cpu(), targets, accumulator)
            results.append(accumulator)
        torch.testing.assert_close(*results, rtol=1e-3, atol=1e-4)

    def test_streamed_scores_equal_those_of_the_cpu(self):
        features, q, targets = torch.randn(2, 5000, 64), torch.randn(2, 5000), torch.randn(2, 30, 64)
        results = []
        for device in ("cuda", "cpu"):
            shards = [shards_of(features[c], q[c], 700) for c in range(2)]
            blocks = score_blocks(shards, [matrix.to(device) for matrix in targets])
            results.append(torch.cat([block.cpu() for _, _, block in blocks]))
        torch.testing.assert_close(*results, rtol=1e-3, atol=1e-3)

    def test_blockwise_products_equal_whole_ones(self):
        features, targets = torch.randn(3000, 64, device="cuda"), torch.randn(2000, 64, device="cuda")
        blocks = get_matrix_mult_blockwise(features, targets, torch.float32, 700)
        assert blocks.device.type == "cpu"
        torch.testing.assert_close(blocks, (features @ targets.T).cpu(), rtol=1e-4, atol=1e-4)


def test_nothing_is_copied_on_the_host():
    tensor = torch.arange(5)
    assert transfers.copied_to_host(tensor) is None
    assert transfers.sent_to_device(tensor, CPU) is tensor


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_copies_are_of_what_was_there_when_they_were_started():
    tensor = transfers.sent_to_device(torch.arange(10_000), torch.device("cuda"))
    arrived = transfers.copied_to_host(tensor.view(100, 100).T)
    tensor.zero_()
    assert torch.equal(arrived(), torch.arange(10_000).view(100, 100).T)
