"""The generator: published answers, the plain reference, and a counter layout that cannot collide."""

import random

import pytest
import torch

from hf_trak.kernels import philox as reference
from hf_trak.kernels.philox import Stream, packed_words, philox_4x32, philox_words, sign_tensor

# The test vectors that come with Random123 (Salmon et al. 2011), philox4x32 with ten rounds.
KNOWN_ANSWERS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN_ANSWERS)
def test_known_answers(counter, key, answer):
    assert reference.philox_4x32_10(counter, key) == answer
    words = philox_4x32(tuple(torch.tensor([c]) for c in counter), key)
    assert tuple(int(word) for word in words) == answer


def test_tensor_form_equals_reference_on_mixed_shapes():
    draw = random.Random(0)
    rows = [draw.getrandbits(32) for _ in range(7)]
    columns = [draw.getrandbits(32) for _ in range(5)]
    key = (draw.getrandbits(32), draw.getrandbits(32))
    words = philox_4x32((torch.tensor(rows)[:, None], 12345, torch.tensor(columns), 0xFFFFFFFF), key)
    for i, row in enumerate(rows):
        for j, column in enumerate(columns):
            expected = reference.philox_4x32_10((row, 12345, column, 0xFFFFFFFF), key)
            assert tuple(int(word[i, j]) for word in words) == expected


@pytest.mark.parametrize("start", [0, 2**32 - 3, 2**40 + 17, 2**63 - 6])
def test_layout_equals_reference_beyond_32_bits(start):
    seed, model_id = 2**62 + 2**33 + 5, 2**32 - 1
    words = philox_words(start, 6, seed, model_id, Stream.SJLT_1_SIGNS, torch.tensor([0, 3, 2**24 - 1]))
    for i in range(6):
        for j, block in enumerate((0, 3, 2**24 - 1)):
            expected = reference.philox(start + i, block, 3, seed, model_id)
            assert tuple(int(word[i, j]) for word in words) == expected


def test_signs_use_all_128_bits_in_order():
    """Signs must not come from a few low bits."""
    words = philox_words(99, 3, 4, 5, Stream.RADEMACHER_1)
    signs = sign_tensor(packed_words(words))
    assert signs.shape == (3, 128)
    for i in range(3):
        expected = [reference.sign(reference.philox(99 + i, 0, 1, 4, 5), bit) for bit in range(128)]
        assert signs[i].tolist() == expected


@pytest.mark.parametrize("stream", list(Stream))
@pytest.mark.parametrize("blocks", [0, 3])
def test_words_are_made_on_the_device_that_is_asked_for(stream, blocks):
    """Also where position and block leave the first rounds as plain integers."""
    words = philox_words(0, 5, 2**40, 7, stream, blocks, device="meta")
    assert [(word.device.type, word.shape) for word in words] == [("meta", (5,))] * 4
