"""`hf-trak COMMAND …`: find the command, run it, and turn errors into messages.

This module imports nothing that is slow to import, so that `hf-trak --help` answers at once.
"""

import atexit
import importlib
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass

TRACEBACK = "HF_TRAK_TRACEBACK"
"""Environment variable that makes errors end with a traceback."""


@dataclass(frozen=True)
class Command:
    """One command: a function of the command line in a module."""

    module: str
    summary: str
    positional: str | None = None
    """The argument that may be given first, without its name."""
    function: str = "run"


GROUPS = {
    "Which rows did this?": {
        "featurize": Command("featurize", "compute the features of a training set, or finish computing them"),
        "attribute": Command("attribute", "score the training set against targets and save the run"),
        "report": Command("report", "write a run as one HTML file", "run"),
        "serve": Command("serve", "answer questions about an index or a run on a page in the browser", "index"),
    },
    "How good is the answer?": {
        "verify": Command("verify", "take a training step on the rows found for a target, and see what it does"),
        "evaluate": Command(
            "evaluate", "compute linear datamodeling scores, of one run or of several methods on a bank", "run"
        ),
        "curvature": Command(
            "featurize", "fit the curvature of exact scores, and report on it", function="run_curvature"
        ),
    },
    "Keep and share": {
        "push": Command("push", "publish an index, and scores, on the Hub", "output_dir"),
        "pull": Command("push", "copy a published index into a directory", "repo_id", "run_pull"),
        "convert": Command("convert", "keep features with fewer bits per number", "output_dir"),
        "export": Command("export", "write features as Parquet files, or a store of such files", "output_dir"),
        "inspect": Command(
            "inspect", "show what a directory holds; check every byte of it; clean it up", "output_dir"
        ),
    },
    "This machine": {
        "estimate": Command("estimate", "estimate time, memory and disk space before anything runs"),
        "recommend": Command("recommend", "recommend a method for each budget, with its time and expected quality"),
        "selftest": Command("selftest", "check kernels, engines and a tiny run on this machine"),
        "env": Command("selftest", "print versions, for a bug report", function="run_env"),
    },
}
COMMANDS = {name: command for group in GROUPS.values() for name, command in group.items()}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        argv: the command line without the name of the program. By default that of the process.

    Returns:
        The exit status: 0, 1 if the command failed or nobody reads its output to the end, 2 if the command line is
        wrong, 130 after Ctrl-C.
    """
    try:
        status = _run(argv)
        sys.stdout.flush()
    except BrokenPipeError:  # as of `hf-trak env | head`; the documentation of `signal` tells why to open `devnull`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return status


def _run(argv: Sequence[str] | None) -> int:
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
    atexit.register(_leave_process_group)
    if command.positional is not None and rest and not rest[0].startswith("-"):
        rest = [f"--{command.positional}", *rest]
    try:
        module = importlib.import_module(f"hf_trak.cli.{command.module}")
        return int(getattr(module, command.function)(rest) or 0)
    except KeyboardInterrupt:
        print(f"hf-trak {name}: interrupted", file=sys.stderr)
        return 130
    except (ValueError, TypeError, OSError, ImportError, RuntimeError) as error:
        # The text of an error says what to do; the traceback is for those who ask for it.
        if os.environ.get(TRACEBACK) or isinstance(error, BrokenPipeError):
            raise
        notes = "".join(f"\n{note}" for note in getattr(error, "__notes__", ()))
        print(f"hf-trak {name}: error: {type(error).__name__}: {error}{notes}", file=sys.stderr)
        print(f"(Set {TRACEBACK}=1 for a traceback.)", file=sys.stderr)
        return 1


def usage() -> str:
    """Return the text of `hf-trak --help`."""
    width = max(len(name) for name in COMMANDS)
    lines = list[str]()
    for title, commands in GROUPS.items():
        lines += [title, *(f"  {name:<{width}}  {command.summary}" for name, command in commands.items())]
    return "\n".join(
        [
            "Which training examples made your model do this?",
            "usage: hf-trak COMMAND [--config FILE.yaml] [options]",
            *lines,
            "",
            "`--help` after a command lists its first options, `--help all` every one. On several processes: "
            "`accelerate launch -m hf_trak COMMAND …`.",
        ]
    )


def _leave_process_group() -> None:
    """End the threads of a gloo process group before the interpreter goes, which does not wait for them."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return
    if torch.distributed.get_backend() == "gloo":
        torch.distributed.destroy_process_group()


def _nearest(name: str) -> str:
    import difflib

    near = difflib.get_close_matches(name, COMMANDS, n=1)
    return f" (did you mean {near[0]}?)" if near else ""
