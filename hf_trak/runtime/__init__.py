"""The surroundings in which the library computes: processes, threads, memory, transfers, progress, interruption.

`processes.py` is the communication between processes, `sharding.py` tells how they divide a model, and `lockstep.py`
keeps them at the same pass through it. `shard_threads.py` is a thread pool for shards, `operator_threads.py` one for
loops of small operators. `transfers.py` copies between host and device, `memory.py` tells free memory, `progress.py`
draws bars, and `interruption.py` is for Ctrl-C and SIGTERM. `checks.py` and `finite.py` check integer arguments and
finite tensors for the whole library. `temporary.py` names temporary files after their writers.

May import: `hf_trak.errors` and `hf_trak._compat`, and nothing else of hf_trak.

Start with `processes.py`.
"""
