"""Products with codes are those of the decoded rows, with the same bits however rows and work are divided."""

import os

import pytest
import torch
from rounding import assert_within, gamma, product_bound
from test_transfers import LateEngine
from torch import Tensor

from hf_trak.errors import NonFiniteError
from hf_trak.kernels import cpu_functions
from hf_trak.kernels.cpu_codes import CompiledProducts
from hf_trak.runtime import transfers
from hf_trak.runtime.processes import map_shards
from hf_trak.scores import coded_products, streaming
from hf_trak.scores.coded_products import LARGEST, IntegerTargets, PlaneTargets, coded_targets
from hf_trak.scores.streaming import ScaledRows, score_blocks
from hf_trak.store.codes import CodedRows, CodeFormat
from hf_trak.store.shard_set import Shard

FORMS = [
    (1, 3),  # less than a byte
    (2, 77),  # one block, padded
    (4, 1000),
    (8, 700),  # two blocks
    (1, 8192),  # a power of two
    (1, 30_011),  # pieces across blocks, padded
    (4, 9_001),
    (8, 5_000),
    (1, 70_000),  # more columns than are added up in 32 bits
    (8, 70_000),
]


@pytest.fixture(autouse=True, params=["compiled", "torch"])
def multiplied(request, monkeypatch) -> None:
    """Multiply integers by the compiled function, and by torch as without a compiler."""
    if request.param == "torch":
        monkeypatch.setenv("HF_TRAK_BACKEND", "torch")
    elif cpu_functions.compiler() is None:
        pytest.skip("no C compiler")
    monkeypatch.setattr(cpu_functions, "_WORTH_COMPILING", 0)


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def encoded(rows: int, bits: int, k: int, seed: int = 0) -> CodedRows:
    """Rows of different lengths, one of them zero."""
    values = drawn(rows, k, seed=seed) * torch.logspace(-3, 3, rows).unsqueeze(1)
    values[rows // 2] = 0
    return CodedRows.encode(values, CodeFormat(bits, k))


def drawn_targets(m: int, k: int, seed: int = 1) -> Tensor:
    """Targets of different lengths. The last of several is zero."""
    targets = drawn(m, k, seed=seed) * torch.logspace(-4, 4, m).unsqueeze(1)
    targets[m - 1] *= m == 1
    return targets


def exact(coded: CodedRows) -> Tensor:
    """The rows in float64: numbers of levels times scales."""
    return coded.decode(scaled=False).double() * coded.scale.double().unsqueeze(1)


def rounding_of_targets(coded: CodedRows, targets: Tensor, largest: int = LARGEST) -> Tensor:
    """Half a step for every entry of a target, and the rounding of three products: step, scale, float32."""
    steps = targets.double().abs().amax(dim=1) / largest
    rows = exact(coded)
    last = gamma(2) * (rows @ targets.double().T).abs()
    return rows.abs().sum(dim=1, keepdim=True) * steps / 2 * (1 + gamma(2)) + last


@pytest.mark.few(15)
@pytest.mark.parametrize(("bits", "k"), FORMS)
def test_integer_products_are_those_of_decoded_rows_and_rounded_targets(bits, k):
    coded, targets = encoded(37, bits, k), drawn_targets(3, k)
    found = IntegerTargets(targets, coded.form).product(coded)
    assert_within(found, exact(coded) @ targets.double().T, rounding_of_targets(coded, targets))


@pytest.mark.parametrize(("bits", "k"), FORMS)
def test_float_products_are_those_of_decoded_rows(bits, k):
    coded, targets = encoded(37, bits, k), drawn_targets(3, k)
    found = PlaneTargets(targets, coded.form).product(coded)
    rows = exact(coded)
    assert_within(found, rows @ targets.double().T, product_bound(rows, targets.T, extra=2))


@pytest.mark.parametrize("m", [1, 2, 5, 128, 129, 300])
@pytest.mark.parametrize("kind", [IntegerTargets, PlaneTargets])
def test_any_number_of_targets(kind, m):
    coded, targets = encoded(5, 2, 3000), drawn_targets(m, 3000)
    rows = exact(coded)
    found = kind(targets, coded.form).product(coded)
    bound = rounding_of_targets(coded, targets) + product_bound(rows, targets.T, extra=2)
    assert_within(found, rows @ targets.double().T, bound)


def rounded_to(bits: int, targets: Tensor, coded: CodedRows) -> Tensor:
    """Products with targets that are rounded to integers of so many bits."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(coded_products, "LARGEST", 2 ** (bits - 1) - 1)
        return IntegerTargets(targets, coded.form).product(coded)


def test_24_bits_are_as_exact_as_float32():
    """Measured against targets in float64, beside products of decoded rows in float32."""
    coded, targets = encoded(64, 1, 8192), drawn_targets(20, 8192)[:-1]
    right = exact(coded) @ targets.double().T
    norms = exact(coded).norm(dim=1, keepdim=True) * targets.double().norm(dim=1)

    def error(products: Tensor) -> float:
        return float(((products - right) / norms).nan_to_num().square().mean().sqrt()) * 8192**0.5

    errors = {bits: error(rounded_to(bits, targets, coded)) for bits in (8, 16, 24)}
    # A step of 2 max|a| / 2ᵇ, max|a| between 3.3σ and 5σ, has a rounding error of step / √12.
    for bits, found in errors.items():
        assert 3.3 < found * 2**bits / 2 * 12**0.5 < 5.5
    assert errors[24] < error(coded.decode() @ targets.T)


def test_targets_that_are_almost_orthogonal_to_all_rows():
    """A small ridge makes them, of what no training row explains. 24 bits lose no more than float32 does."""
    coded = encoded(64, 1, 4096)
    rows, seen = exact(coded), exact(coded)[:20].sum(dim=0)
    noise = drawn(1, 4096, seed=3).double()
    unseen = noise - (noise @ torch.linalg.pinv(rows)) @ rows
    targets = (seen / seen.norm() + 1000 * unseen / unseen.norm()).float()
    right = rows @ targets.double().T
    wanted = (rows @ (seen / seen.norm())).std()
    few, enough = (float((rounded_to(bits, targets, coded) - right).std()) for bits in (16, 24))
    assert few > 0.002 * wanted
    assert enough < 2e-4 * wanted
    assert enough < (coded.decode() @ targets.T - right).std()


def test_bits_do_not_depend_on_the_division_of_rows_columns_or_targets(monkeypatch):
    coded, targets = encoded(50, 2, 9_001), drawn_targets(45, 9_001)
    expected = IntegerTargets(targets, coded.form).product(coded)
    for rows in (7, 50, 1):
        monkeypatch.setattr(coded_products, "_ROWS", rows)
        assert torch.equal(IntegerTargets(targets, coded.form).product(coded), expected)
    assert torch.equal(IntegerTargets(targets[7:8], coded.form).product(coded), expected[:, 7:8])
    prepared = IntegerTargets(targets, coded.form)
    for start, stop in [(0, 1), (3, 20), (49, 50)]:
        assert torch.equal(prepared.product(coded[start:stop]), expected[start:stop])
    picked = torch.tensor([3, 49, 4])
    assert torch.equal(prepared.product(coded[picked]), expected[picked])


def test_bits_do_not_depend_on_the_number_of_threads(monkeypatch):
    coded, targets = encoded(64, 1, 20_000), drawn_targets(40, 20_000)
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            prepared = IntegerTargets(targets, coded.form)
            results.append(prepared.product(coded))
            groups = [slice(start, start + 10) for start in range(0, 64, 10)]
            results.append(torch.cat(list(map_shards(lambda rows, it=prepared: it.product(coded[rows]), groups))))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.parametrize("bits", [1, 4, 8])
def test_no_sum_is_too_large(bits):
    """The highest levels in all columns, and targets that are the same in all columns."""
    form = CodeFormat(bits, 300_000)
    blocks = tuple(torch.full((2, size), 255, dtype=torch.uint8) for size in form.block_bytes)
    coded = CodedRows(form, torch.tensor([1.0, 2.0]), blocks)
    found = IntegerTargets(torch.tensor([[1.0], [-3.0]]).expand(2, 300_000), form).product(coded)
    assert torch.equal(found, 300_000 * (2**bits - 1) / 2 * torch.tensor([[1.0, -3.0], [2.0, -6.0]]))


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_target_that_is_not_finite_has_no_finite_products(value):
    coded, targets = encoded(5, 4, 100), drawn_targets(3, 100)
    targets[1, 17] = value
    found = IntegerTargets(targets, coded.form).product(coded)
    assert found[:, 1].isnan().all() and found[:, [0, 2]].isfinite().all()


def test_both_ways_to_multiply_have_the_same_bits(monkeypatch):
    coded, targets = encoded(50, 4, 9_001), drawn_targets(45, 9_001)
    here = coded_targets(targets, coded.form).product(coded)
    monkeypatch.setenv("HF_TRAK_BACKEND", "torch")
    prepared = coded_targets(targets, coded.form)
    assert torch.equal(prepared.product(coded), here)
    monkeypatch.delenv("HF_TRAK_BACKEND")  # the function is there from now on
    assert torch.equal(prepared.product(coded), here)


@pytest.mark.parametrize("wrong", [("4096 *", "4095 *"), ("row[i] >> place", "row[0] >> place")])
def test_a_function_with_other_sums_is_not_used(monkeypatch, tmp_path, caplog, wrong):
    right = cpu_functions.cpu_source("codes")
    assert wrong[0] in right
    monkeypatch.setenv("HF_TRAK_KERNEL_CACHE", str(tmp_path))
    monkeypatch.setattr(cpu_functions, "cpu_source", lambda name: right.replace(*wrong))
    monkeypatch.setattr(coded_products, "compiled_products", CompiledProducts())
    coded, targets = encoded(5, 4, 100), drawn_targets(3, 100)
    found = IntegerTargets(targets, coded.form).product(coded)
    assert_within(found, exact(coded) @ targets.double().T, rounding_of_targets(coded, targets))
    assert ("codes_add gives other results" in caplog.text) == ("HF_TRAK_BACKEND" not in os.environ)


def shards(coded: CodedRows, q: Tensor, size: int) -> list[Shard]:
    return [
        Shard(start, min(start + size, len(coded)), coded[start : start + size], q[start : start + size])
        for start in range(0, len(coded), size)
    ]


def scores(blocks) -> Tensor:
    return torch.cat([block for _, _, block in blocks])


@pytest.fixture
def problem():
    """Codes of two checkpoints, weights, and targets, whose numbers float32 products with each other cannot hold."""
    codes = [encoded(23, 2, 3000, seed=seed) for seed in (0, 5)]
    qs = [torch.rand(23) + 0.5 for _ in codes]
    targets = [ScaledRows(drawn_targets(5, 3000, seed=seed), torch.tensor([-3, 0, 2, 5, 0])) for seed in (1, 2)]
    return codes, qs, targets


def test_scores_of_shards_with_codes_are_those_of_decoded_shards(problem, monkeypatch):
    codes, qs, targets = problem
    decoded = [
        [Shard(one.start, one.stop, one.grads, one.out_to_loss) for one in shards(coded, q, 9)]
        for coded, q in zip(codes, qs, strict=True)
    ]
    expected = scores(score_blocks(decoded, targets))

    def refuse(self, scaled=True):
        raise AssertionError("a shard was decoded")

    monkeypatch.setattr(CodedRows, "decode", refuse)
    for size in (9, 23, 1):
        found = scores(score_blocks([shards(coded, q, size) for coded, q in zip(codes, qs, strict=True)], targets))
        scale = expected.abs().amax(dim=0) * 2**-15  # 3000 columns, and cancellation; a wrong column would be 2⁻⁷
        assert_within(found, expected, scale)


def test_targets_are_prepared_once(problem, monkeypatch):
    codes, qs, targets = problem
    made = []
    plain = coded_products.coded_targets
    monkeypatch.setattr(
        "hf_trak.scores.streaming.coded_targets", lambda *given: made.append(given[1:]) or plain(*given)
    )
    for _ in range(2):
        scores(score_blocks([shards(coded, q, 9) for coded, q in zip(codes, qs, strict=True)], targets))
    assert len(made) == 2  # one per checkpoint


def test_codes_are_copied_to_a_device_as_they_are(problem, monkeypatch):
    codes, qs, targets = problem
    one = shards(codes[0], qs[0], 5)
    expected = scores(score_blocks([one], targets[:1]))
    engine = ByteEngine()
    monkeypatch.setattr(streaming, "copy_engine", lambda device: engine)
    monkeypatch.setattr(transfers, "copy_engine", lambda device: engine)
    assert torch.equal(scores(score_blocks([one], targets[:1])), expected)
    assert engine.most_waiting > 0
    assert max(len(buffer) for buffer in engine.buffers) == 5 * (codes[0].form.row_bytes + 4)


def test_what_does_not_fit_is_refused(problem):
    codes, qs, targets = problem
    with pytest.raises(ValueError, match="3000 columns, its targets 2999"):
        next(score_blocks([shards(codes[0], qs[0], 9)], [targets[0].values[:, 1:]]))
    first = codes[0].first(512)
    with pytest.raises(ValueError, match="2048 columns, its targets 3000"):
        next(score_blocks([shards(first, qs[0], 9)], targets[:1]))
    broken = CodedRows(codes[0].form, codes[0].scale.clone(), codes[0].blocks)
    broken.scale[11] = torch.nan
    with pytest.raises(NonFiniteError, match="row 11"):
        scores(score_blocks([shards(broken, qs[0], 9)], targets[:1]))


class ByteEngine(LateEngine):
    """As [`LateEngine`], for bytes, which have no NaN: what is not there yet is 255."""

    def upload(self, source):
        assert self._is_pinned(source)
        target = torch.full_like(source, 255)
        return target, self._enqueue(target, source)
