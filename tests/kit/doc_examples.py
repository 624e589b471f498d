"""What the examples of the documentation take for granted: tiny models, rows and trainers."""

from pathlib import Path

from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BertTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
)

WORDS = [
    "good",
    "bad",
    "film",
    "plot",
    "dull",
    "great",
    "the",
    "a",
    "was",
    "not",
    "very",
    "fox",
    "sleeps",
    "barn",
    "in",
]


def tiny_bert(num_labels: int = 2) -> BertForSequenceClassification:
    config = BertConfig(
        vocab_size=30,
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=8,
        num_labels=num_labels,
    )
    return BertForSequenceClassification(config)


def sentences(n: int) -> Dataset:
    """Tokenized rows with labels, and the columns that examples group by."""
    return Dataset.from_dict(
        {
            "input_ids": [[i % 29 + 1] * 5 for i in range(n)],
            "labels": [i % 2 for i in range(n)],
            "label": [i % 2 for i in range(n)],
            "source": ["book" if i % 3 else "web" for i in range(n)],
            "text": [f"sentence {i}" for i in range(n)],
        }
    )


def make_trainer(rows: Dataset, seed: int) -> Trainer:
    """One training step: retrainings are many."""
    arguments = TrainingArguments(
        output_dir="retraining",
        max_steps=1,
        seed=seed,
        use_cpu=True,
        report_to="none",
        save_strategy="no",
    )
    return Trainer(model=tiny_bert(), args=arguments, train_dataset=rows)


def trained_trainer() -> Trainer:
    """A trainer as the reader has it after training, with checkpoints of steps 100 and 200 in `out`."""
    arguments = TrainingArguments(output_dir="out", max_steps=200, save_steps=100, use_cpu=True, report_to="none")
    trainer = Trainer(model=tiny_bert(), args=arguments, train_dataset=sentences(40))
    trainer.train()
    return trainer


def word_tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {word: i for i, word in enumerate(["<pad>", "<s>", "</s>", *WORDS])}
    plain = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    plain.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=plain, pad_token="<pad>", bos_token="<s>", eos_token="</s>")


def tiny_gpt2() -> GPT2LMHeadModel:
    config = GPT2Config(vocab_size=30, n_embd=16, n_layer=1, n_head=2, n_positions=16, bos_token_id=1, eos_token_id=2)
    return GPT2LMHeadModel(config).eval()


def documents(tokenizer: PreTrainedTokenizerFast, n: int) -> Dataset:
    """Tokenized texts, each with the word "sleeps" once."""
    texts = [f"{WORDS[i % 10]} fox sleeps in the {WORDS[(i + 3) % 10]} barn" for i in range(n)]
    ids = [tokenizer(text)["input_ids"] for text in texts]
    return Dataset.from_dict({"text": texts, "input_ids": ids, "labels": ids})


def write_reviews(directory: Path) -> None:
    """What the examples of the command line start from: `model/`, `reviews.jsonl` and `mine.jsonl`."""
    (directory / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]))
    tiny_bert().save_pretrained(directory / "model")
    tokenizer = BertTokenizer(vocab=str(directory / "vocab.txt"), model_max_length=32)
    tokenizer.save_pretrained(directory / "model")
    for name, count in (("reviews", 40), ("mine", 4)):
        texts = [f"{WORDS[i % 7]} {WORDS[i % 5]} {WORDS[i % 11]} film" for i in range(count)]
        rows = Dataset.from_dict({"text": texts, "label": [i % 2 for i in range(count)]})
        rows.to_json(directory / f"{name}.jsonl")
