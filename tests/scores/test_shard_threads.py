"""Shards worked on side by side come in order, with bits that do not depend on the number of threads."""

import threading
import time

import pytest
import torch
from rounding import assert_within, product_bound

from hf_trak.runtime.processes import map_shards


@pytest.fixture(params=[1, 3])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def test_results_come_in_order(threads):
    def slow_first(thing):
        time.sleep(0.05 if thing % 3 == 0 else 0)
        return thing, torch.get_num_threads()

    found = list(map_shards(slow_first, range(20)))
    assert found == [(thing, 1) for thing in range(20)]  # each with one core
    assert torch.get_num_threads() == threads


def test_at_most_so_many_are_held(threads):
    begun, most = [], 0
    for taken, _ in enumerate(map_shards(begun.append, range(30)), 1):
        most = max(most, len(begun) - taken)
    assert most <= threads
    assert len(begun) == 30


def test_an_error_comes_in_its_place_and_ends_it(threads):
    def fails(thing):
        if thing == 4:
            raise KeyError(thing)
        return thing

    found = []
    with pytest.raises(KeyError, match="4"):
        for thing in map_shards(fails, range(1000)):
            found.append(thing)
    assert found == [0, 1, 2, 3]
    assert torch.get_num_threads() == threads


def test_closing_it_early_leaves_no_thread(threads):
    before = threading.active_count()
    results = map_shards(lambda thing: thing, range(1000))
    assert next(results) == 0
    results.close()
    assert threading.active_count() == before
    assert torch.get_num_threads() == threads
    started = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
    found: list[int] = []
    started.start()
    started.join()
    assert found == [threads]  # other threads are not left with one core


def test_nothing_gives_nothing(threads):
    assert list(map_shards(lambda thing: thing, [])) == []


def test_scores_have_the_same_bits_for_any_number_of_threads(tmp_path):
    from hf_trak.runtime.processes import Processes
    from hf_trak.scores.scorer import Scorer
    from hf_trak.store.store import FeatureStore

    n, k, m = 533, 24, 7
    config = {"train_size": n, "proj_dim": k, "feature_dtype": "float32", "shard_size": 10}
    store = FeatureStore.open(tmp_path, config)
    features, weights, targets = torch.randn(2, n, k), torch.rand(2, n), torch.randn(2, m, k)
    for model_id in range(2):
        store.register_checkpoint(model_id, f"weights {model_id}")
        shards = store.train(model_id)
        for index in range(len(shards)):
            rows = shards.plan.rows(index)
            shards.write(index, *(each[model_id][rows.start : rows.stop] for each in (features, weights)))
    processes = Processes(use_cpu=True)
    scorer = Scorer(FeatureStore.load(tmp_path), processes, processes.device, 0.3)
    found = []
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            blocks = list(scorer.blocks([0, 1], list(targets)))
            assert [start for start, _, _ in blocks[1:]] == [stop for _, stop, _ in blocks[:-1]]
            found.append(torch.cat([block for _, _, block in blocks]))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])
    weight = weights.double().mean(0).unsqueeze(1)
    expected = (features.double() @ targets.double().mT).mean(0) * weight
    # sums of 24 products; a sum, a division and a product by a mean of two make six more roundings
    assert_within(found[0], expected, product_bound(features, targets.mT, extra=6).mean(0) * weight)
