"""What docs/works_with.md says that works: the first case of each table by default, all among the slow tests."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from doc_pages import ROOT

pytest.importorskip("trl")
pytest.importorskip("timm")
sys.path.insert(0, str(ROOT / "benchmarks"))
import ecosystem

FIRST = [(cases[0], group) for group, cases in ecosystem.GROUPS.items()]
REST = [(case, group) for group, cases in ecosystem.GROUPS.items() for case in cases[1:]]
PACKAGES = {
    "diffusers: `UNet2DModel`": "diffusers",
    "the model inside of a LightningModule": "lightning",
    **{
        case.title: "setfit" if "setfit" in case.title else "sentence_transformers"
        for case in ecosystem.GROUPS["sentence-transformers"]
    },
    **{
        case.title: "torchao" if "torchao" in case.title else "bitsandbytes"
        for case in ecosystem.GROUPS["Quantized, random, refused"]
        if case.title.startswith("LoRA on")
    },
}


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        *(pytest.param(case, id=case.title) for case, _ in FIRST),
        *(pytest.param(case, id=case.title, marks=pytest.mark.slow) for case, _ in REST),
    ],
)
def test_it_works(case: Any) -> None:
    if case.title in PACKAGES:
        pytest.importorskip(PACKAGES[case.title])
    fine, line = ecosystem.outcome(case)
    assert fine, line


def test_the_page_lists_every_case() -> None:
    page = Path(ROOT / "docs" / "works_with.md").read_text(encoding="utf-8")
    for case, group in (*FIRST, *REST):
        assert f"## {group}\n" in page
        assert f"| {case.title} | " in page
    assert "refused**" not in page
