"""The surroundings in which the library computes: processes, threads, memory, transfers, progress, interruption.

`processes.py` is the communication between processes, `sharding.py` tells how they divide a model, and `lockstep.py`
keeps them at the same pass through it. `zero.py` gathers what ZeRO-3 partitions. `operator_threads.py` runs loops of
small operators in threads. `transfers.py` copies between host and device, and `progress.py` draws bars and deals with
Ctrl-C and SIGTERM. `checks.py` checks integers and finite tensors for the whole library, and tells free memory;
`arguments.py` refuses unknown names of arguments. `temporary.py` names temporary files after their writers.

May import: `hf_trak.errors` and `hf_trak._compat`, and nothing else of hf_trak.

Start with `processes.py`.
"""
