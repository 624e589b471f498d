"""What the recipes share: each `recipes/<name>/run.py` tells a story, and this package holds their common parts.

Start with `training` (arguments of recipes, training that resumes, featurizing and scoring), then `splits` (which rows
to train on and to explain), `text_models` and `python_text` (tokenizers and texts that need no network), `outcome`
(what is printed at the end), `grid` (pictures) and `files` (what is left on disk).

`recipes/` must be on `sys.path`; each `run.py` puts it there. The library imports nothing from here.
"""
