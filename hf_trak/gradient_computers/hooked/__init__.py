"""The hooked engine: per-sample gradients of all layers from one pass over a batch. Start reading at `computer.py`.

1. One sample goes through the model alone, and every tensor is traced that layers and parameters meet (`traces`).
2. The batch follows (`hooked_pass`). The dimension of a tensor that has grown by B is the batch (`batch_axis`).
3. Of each layer with a rule, the input is kept; its output gradient arrives in the backward pass (`hooks`).
4. A parameter used outside of such layers is followed from call to call (`tracker`) until it meets the batch; there a
   handler makes its gradient arrive per sample (`batched_op`, `op_handlers`).
5. A module with neither is evaluated once more, alone, sample by sample (`replay`).
6. The rule (`rules`), the handler or the replay gives blocks `(B, n)`, built in a `workspace`, for the sink; linear
   layers may give two factors instead (`outer`). What a pass finds out (a layer without a batch, a module to be
   replayed) is kept in the model trace, and the pass begins again.

Imports go one way: batch_axis, tensors <- traces <- hooked_pass <- batched_op <- op_handlers <- tracker <- computer,
with hooks and replay beside the tracker. The package imports tasks and `_compat`; no files, no projections.
"""
