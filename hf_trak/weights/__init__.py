"""Weights of models: reading, loading, identifying and watching them.

`checkpoints.py` reads checkpoints of every kind, gives them a fingerprint, and loads them into a model and out again.
`adapters.py` does the same for adapters of PEFT. `placement.py` refuses models whose parameters are not whole in this
process. `watch.py` notices weights that change.

May import: `hf_trak.errors`.

Start with `checkpoints.py`.
"""
