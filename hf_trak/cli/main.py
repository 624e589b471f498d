"""`hf-trak COMMAND …`: finds the command, runs it, and turns errors into messages.

Nothing heavy is imported here: `hf-trak --help` is answered by this module alone.
"""

import importlib
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass

TRACEBACK = "HF_TRAK_TRACEBACK"
"""Environment variable: set it to see where an error came from."""


@dataclass(frozen=True)
class Command:
    """One command: its module has `run(argv)`."""

    module: str
    summary: str
    positional: str | None = None
    """The argument that may stand first without its name."""


COMMANDS = {
    "featurize": Command("featurize", "compute the features of a training set, or finish computing them"),
    "attribute": Command("attribute", "score the training set against targets and save the run"),
    "report": Command("report", "write a run as one HTML file", "run"),
    "evaluate": Command("evaluate", "the linear datamodeling score of a run", "run"),
    "push": Command("push", "publish an index, and scores, on the Hub", "output_dir"),
    "pull": Command("pull", "copy a published index into a directory", "repo_id"),
    "estimate": Command("estimate", "time, memory and disk before anything runs"),
    "inspect": Command("inspect_store", "what a directory holds, what is missing, whether it is intact", "output_dir"),
    "verify-store": Command(
        "verify_store", "check every byte of a directory, and say what computes damaged files again", "output_dir"
    ),
    "clean": Command("clean", "show and remove what interrupted processes left behind", "output_dir"),
    "upgrade": Command("upgrade", "bring a directory of an older version up to date", "output_dir"),
    "env": Command("env", "versions, for a bug report"),
    "selftest": Command("selftest", "check kernels, engines and a tiny run on this machine"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        argv: without the name of the program. `None` takes the process's.

    Returns:
        The exit status: 0, 1 if the command failed, 2 if the command line is wrong, 130 after Ctrl-C.
    """
    given = list(sys.argv[1:] if argv is None else argv)
    if not given or given[0] in ("-h", "--help", "help"):
        print(usage(), file=sys.stdout if given else sys.stderr)
        return 0 if given else 2
    if given[0] == "--version":
        from hf_trak.version import __version__

        print(f"hf_trak {__version__}")
        return 0
    name, rest = given[0], given[1:]
    if name not in COMMANDS:
        print(f"hf-trak: error: there is no command {name!r}{_nearest(name)}. See `hf-trak --help`.", file=sys.stderr)
        return 2
    command = COMMANDS[name]
    if command.positional is not None and rest and not rest[0].startswith("-"):
        rest = [f"--{command.positional}", *rest]
    try:
        return int(importlib.import_module(f"hf_trak.cli.{command.module}").run(rest) or 0)
    except KeyboardInterrupt:
        print(f"hf-trak {name}: interrupted", file=sys.stderr)
        return 130
    except (ValueError, TypeError, OSError, ImportError, RuntimeError) as error:
        # What a user can act on says so in its text; the way it came about is for those who ask.
        if os.environ.get(TRACEBACK):
            raise
        notes = "".join(f"\n{note}" for note in getattr(error, "__notes__", ()))
        print(f"hf-trak {name}: error: {type(error).__name__}: {error}{notes}", file=sys.stderr)
        print(f"({TRACEBACK}=1 shows where.)", file=sys.stderr)
        return 1


def usage() -> str:
    """What `hf-trak --help` prints."""
    width = max(len(name) for name in COMMANDS)
    lines = [f"  {name:<{width}}  {command.summary}" for name, command in COMMANDS.items()]
    return "\n".join(
        [
            "Which training examples made your model do this?",
            "",
            "usage: hf-trak COMMAND [--config FILE.yaml] [options]",
            "",
            *lines,
            "",
            "`hf-trak COMMAND --help` lists the options of a command. On several processes:",
            "`accelerate launch -m hf_trak COMMAND …`.",
        ]
    )


def _nearest(name: str) -> str:
    import difflib

    near = difflib.get_close_matches(name, COMMANDS, n=1)
    return f" (did you mean {near[0]}?)" if near else ""
