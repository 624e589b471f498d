"""Weights of models: reading, loading, identifying and watching them.

`checkpoints.py` reads checkpoints of every kind, gives them a fingerprint, and loads them into a model and out again.
`adapters.py` does the same for adapters of PEFT, and refuses models whose parameters cannot be reached. `sharded.py`
compares how processes divide a model, puts whole weights into it, and reads checkpoints of sharded trainings.
`watch.py` notices weights that change.

May import: `hf_trak.errors`, `hf_trak.runtime` and `hf_trak._compat`.

Start with `checkpoints.py`.
"""
