"""The feature store: tensors and JSON records on disk that are either complete or not there.

A store holds the features of a run (`store.py`, [`FeatureStore`]): its configuration, the records of checkpoints and
experiments, shards of feature matrices, and Gram matrices. Every file says what it was computed from, carries a
checksum of itself, and appears at once under its name, so that killed and concurrent runs do no harm.

May import: `hf_trak.errors`, `hf_trak.runtime` and `hf_trak.store.codes`. It knows neither models nor how features or
scores are computed.

Start with the docstring of `store.py`, which lists the files; then `shards.py` (one file of tensors), `sealed.py`
(one file of JSON) and `atomic.py` (how files appear, and who removes temporary ones). `lease.py` says who removes
unfinished work.
"""
