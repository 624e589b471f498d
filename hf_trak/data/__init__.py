"""Datasets, streams and collators: how rows become batches that a model can take.

`rows` loads batches of given rows in a fixed order, with the columns that `Trainer` would keep. `streams` gives a
stream a length and row numbers. `language` and `image_text` make token rows and CLIP batches of texts and images.
Random rows are drawn with seeds of their own (`drawn_rows`, `generators`, `joining`), sequences of several rows are
cut at the rows (`packing`), and `trainer_columns` reads which columns a trainer's collator needs. `preferences`,
`text_columns` and `text_pairs` make the tasks of trainers of TRL and of sentence-transformers. `model_inputs` and
`batch_limits` check rows and batches before they reach the model, so that errors speak of columns, tokenizers and
processors instead of tensors inside the model.

This package may import `modelout_functions` (names of label and token columns), `identity` and `runtime`. It knows no
gradients, features or scores. Start with `rows.py`, class `RowBatches`.
"""
