"""Tokenizers for models that a recipe trains from scratch."""

from collections.abc import Iterable

from tokenizers import ByteLevelBPETokenizer, processors
from transformers import PreTrainedTokenizerFast

PAD, START, END, MASK = "<pad>", "<s>", "</s>", "<mask>"


def train_tokenizer(texts: Iterable[str], vocab_size: int, max_length: int, pairs: bool) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer. The same texts give the same tokenizer.

    Args:
        texts: the texts to learn the vocabulary from.
        vocab_size: number of tokens, at least the 256 bytes and four special ones.
        max_length: length at which `truncation=True` cuts.
        pairs: whether to put special tokens around one text or a pair of texts, as encoders expect.
    """
    trained = ByteLevelBPETokenizer()
    trained.train_from_iterator(
        texts, vocab_size=vocab_size, special_tokens=[PAD, START, END, MASK], show_progress=False
    )
    inner = trained._tokenizer
    if pairs:
        inner.post_processor = processors.TemplateProcessing(
            single=f"{START} $A {END}",
            pair=f"{START} $A {END} $B:1 {END}:1",
            special_tokens=[(token, inner.token_to_id(token)) for token in (START, END)],
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=inner,
        pad_token=PAD,
        bos_token=START,
        eos_token=END,
        mask_token=MASK,
        model_max_length=max_length,
        model_input_names=["input_ids", *(["token_type_ids"] if pairs else []), "attention_mask"],
    )
