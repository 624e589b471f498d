"""What a fit takes is said before it begins: by `estimate`, and by a warning where it is more than there is."""

import logging
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from digit_models import DigitNet, digits, make
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from hf_trak import TrakAttributor, TrakConfig, estimate
from hf_trak.curvature import fit
from hf_trak.featurize import fit_batches as fit_resources

SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}


def llama(vocabulary: int, tied: bool) -> nn.Module:
    with torch.device("meta" if vocabulary > 1000 else "cpu"):
        return LlamaForCausalLM(LlamaConfig(vocab_size=vocabulary, tie_word_embeddings=tied, **SIZES)).eval()


def test_estimate_names_an_untied_head():
    args = TrakConfig("unused", curvature="ekfac", use_cpu=True)
    found = estimate(llama(262144, False), 10_000, args, method="exact")
    bases = 32 * 8192**2 + 16**2
    assert found.largest_share is not None and found.largest_share.slots[0].name == "lm_head.weight"
    assert found.largest_share.memory == 8 * bases
    assert found.largest_share.disk == 4 * (bases + 262144 * 16)
    assert "'lm_head.weight' (262,144 × 16, 32 bases of 8,192) takes 16.0 GiB of the memory and 8.0 GiB" in str(found)


@pytest.mark.parametrize(("tied", "curvature"), [(True, "ekfac"), (False, "diagonal")])
def test_a_tied_head_and_single_numbers_have_no_bases(tied, curvature):
    found = estimate(
        llama(262144, tied), 10_000, TrakConfig("unused", curvature=curvature, use_cpu=True), method="exact"
    )
    assert "lm_head" not in str(found) and "embed_tokens" not in str(found)
    assert (found.largest_share is None) == (curvature == "diagonal")


@pytest.mark.few(2)
@pytest.mark.parametrize("short", ["memory", "disk", "nothing"])
def test_a_fit_that_needs_more_than_there_is_says_so_first(tmp_path: Path, monkeypatch, caplog, short):
    ids = torch.randint(0, 50, (8, 6), generator=torch.Generator().manual_seed(0)).tolist()
    rows = Dataset.from_dict({"input_ids": ids, "labels": ids})
    args = TrakConfig(str(tmp_path), curvature="ekfac", use_cpu=True)
    one = TrakAttributor(llama(50, False), args, train_dataset=rows, task="causal_lm")
    monkeypatch.setattr(fit_resources, "free_bytes", lambda device: 1024 if short == "memory" else 2**40)
    monkeypatch.setattr(fit_resources, "_free_disk", lambda directory: 1024 if short == "disk" else 2**40)
    said: list[bool] = []
    original = fit.CurvatureFit._conclude

    def conclude(self, blocks):
        said.append(any("takes about" in record.message for record in caplog.records))
        original(self, blocks)

    monkeypatch.setattr(fit.CurvatureFit, "_conclude", conclude)
    with caplog.at_level(logging.WARNING, "hf_trak"):
        one.fit_curvature()
    messages = [record.message for record in caplog.records if "takes about" in record.message]
    assert said == [short != "nothing"] and len(messages) == (short != "nothing")
    for message in messages:
        assert "'lm_head.weight' (50 × 16)" in message and "(1.0 KiB are free)" in message
        assert 'curvature="diagonal"' in message and (" of disk" in message) == (short == "disk")


def test_checks_pass_no_batch_through_the_model_again(tmp_path: Path, monkeypatch):
    """A fit checks one batch and looks at another before its two passes; scores check batches as they go."""
    passes: list[int] = []

    class Counting(DigitNet):
        def forward(self, pixel_values: Tensor, labels: Tensor | None = None):
            passes.append(len(pixel_values))
            return super().forward(pixel_values, labels)

    monkeypatch.setattr("hf_trak.gradient_computers.auto.KEPT_BYTES", 0)  # as for gradients of a large model
    torch.manual_seed(0)
    net = Counting().eval()
    one = make(net, tmp_path, digits(0, 20), shard_size=20, curvature="ekfac")
    one.fit_curvature()
    assert passes.count(5) == 2 + 2 * 4
    passes.clear()
    one.attribute(digits(20, 23), method="exact", top_k=5)
    assert (passes.count(5), passes.count(3)) == (4, 1)
