"""Scoring: from stored features to TRAK scores, top-k lists and datasets of scores.

With training features X_c `(n, k)`, target features t_c `(m, k)` and weights q_c `(n,)` of checkpoints c = 1 … C, the
scores of n training rows for m targets are (TRAK paper, arXiv 2303.14186, Section 3.4)

    τ = (1/C Σ_c X_c (X_cᵀX_c + λ_c I)⁻¹ t_cᵀ) ∘ (1/C Σ_c q_c)        (n, m)

`gram` sums XᵀX, `ridge` chooses λ and solves; `solvers` chooses among that, `dual` and `low_rank` (from `subspace`).
`streaming` multiplies shard by shard, `topk` keeps the best rows, `first_pass` looks at the first bytes of
all rows. `scorer` runs them over a store and all processes; `score_files` makes datasets of the result.
`groups`, `selection` and `spans` aggregate over targets, choose training rows, and break scores down by label.

May import `data`, `modelout_functions`, `store`, `codes`, `config`, `kernels` and `runtime`. It computes no gradients.
Start with `streaming.py`, which holds the formula.
"""
