"""Text as rows of equally many tokens, so that no row is padded and no case needs an attention mask."""

from collections.abc import Callable, Sequence

import torch
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor

LENGTH = 32
"""Tokens per row."""


def bpe_tokenizer(texts: Sequence[str], vocabulary: int) -> Tokenizer:
    """Train byte-level byte-pair encoding, which knows every character and decodes to the text itself."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocabulary, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def pieces(tokenizer: Tokenizer, texts: Sequence[str], length: int = LENGTH) -> list[list[list[int]]]:
    """Cut each text into consecutive pieces of `length` tokens; what remains at the end of a text is left out."""
    return [
        [encoded.ids[start : start + length] for start in range(0, len(encoded.ids) - length + 1, length)]
        for encoded in tokenizer.encode_batch(list(texts))
    ]


def decoder(tokenizer: Tokenizer) -> Callable[[Dataset], list[str]]:
    """A function that turns rows with `input_ids` back into texts."""

    def texts(rows: Dataset) -> list[str]:
        return [text.strip() for text in tokenizer.decode_batch(rows["input_ids"][:])]

    return texts


def ids(rows: Dataset) -> Tensor:
    """Token ids, `(B, T)`."""
    return torch.tensor(rows["input_ids"][:])


def additive(kept: Tensor, rows: int) -> Tensor:
    """The mask `(rows, 1, T, T)` that is added to attention scores, 0 where `kept`, `(T, T)`, is true.

    transformers looks into a 2-D attention mask, and makes a causal one with Python branches on tensors. vmap
    forbids both. It takes a 4-D mask as it is.
    """
    mask = torch.zeros(kept.shape).masked_fill(~kept, torch.finfo(torch.float32).min)
    return mask.repeat(rows, 1, 1, 1)
