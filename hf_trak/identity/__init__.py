"""Identities of rows, models, functions and collators, by which a store notices that one of them has changed.

`row_digest.py` hashes datasets, `collation.py` describes the batches that a collator makes, `model_identity.py` what a
model computes apart from its weights (with `module_settings.py` and `config_identity.py`), and `function_identity.py`
the code of a user (with `own_code.py`).

Digests and names are on disk, so that the same input must give the same identity in later versions.

May import nothing else of hf_trak but `_compat`.

Start with `function_identity.py` or `model_identity.py`.
"""
