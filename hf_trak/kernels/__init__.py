"""The CUDA kernels of `cuda_ext/`: compiled at first use, kept on disk, launched on torch's current stream.

From bottom to top: `sources` (what there is to compile), `compiler` (NVRTC), `cache` (cubins on disk), `runtime`
(load and launch), `sparse` and `dense` (how a projection is cut into launches), `self_check` (kernels against the
reference), `backend` (whether kernels are used at all). `python -m hf_trak.kernels.build` compiles everything ahead of
time.

Nothing here is imported before the first CUDA tensor arrives, and nothing needs a GPU to be imported.
"""
