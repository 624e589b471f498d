"""The surroundings in which the library computes: processes, threads, memory, transfers, progress, interruption.

`processes.py` is the communication between processes, `shard_threads.py` a thread pool for shards, `transfers.py`
copies between host and device, `memory.py` free memory, `progress.py` bars and estimates, `interruption.py` Ctrl-C and
SIGTERM. `checks.py` and `finite.py` check integer arguments and finite tensors for the whole library.

May import: `hf_trak.errors`, and nothing else of hf_trak.

Start with `processes.py`.
"""
