"""A warning of derivatives that grow on the way back names those that scores depend on."""

from pathlib import Path

import pytest
import torch
from replay_runs import recorded, replayed, tiny

from hf_trak.methods import Replay
from hf_trak.trajectory.swept_targets import SweptTargets


@pytest.mark.slow
@pytest.mark.parametrize("warmup", [0, 3])
def test_nothing_is_said_of_what_lies_before_the_first_step_that_moves_the_weights(
    warmup: int, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a new adapter, A has no gradient in the first step, and Adam's step there a slope of 1/ε.

    Warming up, the first step has no rate, so that the second finds the same weights.
    """
    peft = pytest.importorskip("peft")
    torch.manual_seed(2)
    adapters = peft.LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True, lora_alpha=4)
    run = recorded(tmp_path, peft.get_peft_model(tiny(), adapters).double(), warmup_steps=warmup)
    seen = []
    monkeypatch.setattr(
        SweptTargets, "result", lambda self, read=SweptTargets.result: seen.append(read(self)) or seen[-1]
    )
    replayed(run, tmp_path, Replay(of="run"))
    unmoved = 2 if warmup else 1
    assert float(seen[0].growth[:unmoved].min()) > 1e3 > float(seen[0].growth[unmoved:].max())
    assert not [text for text in caplog.messages if "grew" in text]
