"""Code that the recipes share: each `recipes/<name>/run.py` tells a story, and this package holds their common parts.

Start with `training` (arguments of recipes, training that resumes, featurizing and scoring), then `splits` (which rows
to train on and to explain), `text_models` and `python_text` (tokenizers and texts that need no network), `outcome`
(what is printed at the end) and `files` (what is left on disk).

May import everything but `hf_trak.cli`. The library itself imports nothing from here; the command line does.
"""
