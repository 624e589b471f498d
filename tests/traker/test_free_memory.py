"""Tests of `hf_trak.runtime.checks`."""

import psutil
import pytest
import torch

from hf_trak.runtime.checks import free_bytes


def test_the_free_memory_of_the_cpu_is_part_of_all_memory():
    free = free_bytes("cpu")
    assert isinstance(free, int) and 0 < free < psutil.virtual_memory().total
    assert free_bytes(torch.device("cpu")) > 0


def test_an_accelerator_has_what_is_free_and_what_its_allocator_holds_unused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1000, 8000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 300)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 100)
    assert free_bytes("cuda:0") == 1200


def test_a_device_whose_memory_is_not_known_is_named():
    with pytest.raises(ValueError, match="meta"):
        free_bytes("meta")
