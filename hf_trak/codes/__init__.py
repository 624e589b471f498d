"""Codes of features: 8, 4, 2 or 1 bits per number instead of 32.

A row of features is rotated at random (`rotation.py`), after which its entries look like independent normal numbers
whatever the row was. Each entry is then rounded to a few levels, which are kept with one scale per row
(`coded_rows.py`) and packed into bytes (`packing.py`). Rotations keep inner products, so that Gram matrices,
ridge regressions and scores of rotated features are those of the features themselves, up to the rounding.

`reference.py` defines all of it entry by entry. A version is part of every name: `hadamard-1` and `levels-1`.

May import: `hf_trak.errors`, `hf_trak.runtime`, `hf_trak.kernels` and `hf_trak._ops`. Knows no files.

Start with `reference.py`, then `coded_rows.py`.
"""
