"""The `hf-trak` program: one module for each command, and the parser that recipes and commands share.

`main.py` finds the command and turns errors into messages. `parser.py` fills dataclasses from a YAML file and the
command line, holds those that several commands have, and prints the result. `build.py` makes an attributor of them,
with `preparation.py`, which reads rows and columns.

May import everything in hf_trak. Only recipes import this package.

Start with `main.py`, then read `featurize.py` as an example of a command.
"""
