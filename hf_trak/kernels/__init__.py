"""The random maps as code that runs: in torch operators on any device, and as the CUDA kernels of `cuda_ext/`.

Start with `torch_sparse`, `torch_dense` and `torch_hadamard`, the maps in torch operators over the generator in
`philox`. The CUDA kernels, from bottom to top: `sources` (what there is to compile), `compiler` (NVRTC), `cache`
(cubins on disk), `runtime` (load, and launch on torch's current stream), `sparse`, `outer`, `dense` and `hadamard`
(how a map is cut into launches), `self_check` (kernels against the torch code, before their first result is used) and
`backend` (whether kernels are used at all). `python -m hf_trak.kernels.build` compiles everything ahead of time.

May import `hf_trak.errors`. Knows no projectors: `ops` makes torch operators of the rest. Nothing here
needs a GPU, a driver or a compiler to be imported.
"""
