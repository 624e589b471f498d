"""`hf-trak clean`: show and remove temporary files of interrupted processes."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hf_trak.cli.parser import OutputArguments, answer, parse_yaml_and_args, size
from hf_trak.runtime.progress import duration
from hf_trak.store.atomic import Leftover, leftovers


@dataclass
class CleanArguments:
    """The directory to clean, and what to remove."""

    output_dir: str = field(metadata={"help": "Directory of a store, an index, a run or a TRAKer; may stand first."})
    remove: bool = field(
        default=False,
        metadata={
            "help": "Remove files of dead processes of this host, and files of other hosts that are over a day old. "
            "Without this option, nothing is removed."
        },
    )
    everything: bool = field(
        default=False,
        metadata={
            "help": "Also remove files that a running process may be writing. Use it only while nothing runs there."
        },
    )


def run(argv: Sequence[str]) -> None:
    """Show temporary files of interrupted processes, and remove them on request.

    Raises:
        FileNotFoundError: the directory does not exist.
    """
    args, output = parse_yaml_and_args(
        (CleanArguments, OutputArguments),
        argv,
        prog="hf-trak clean",
        description="Show the temporary files that interrupted processes left in a directory and below it, and remove "
        "them with --remove. Files of results are never touched.",
    )
    directory = Path(args.output_dir)
    if not directory.is_dir():
        raise FileNotFoundError(
            f"`output_dir` is {args.output_dir!r}, which is not a directory. Expected the one to clean."
        )
    found = leftovers(directory)
    gone = [one for one in found if (args.everything or (args.remove and one.removable)) and one.remove()]
    content: dict[str, Any] = {
        "output_dir": str(directory),
        "leftovers": [_described(one) for one in found],
        "bytes": sum(one.size for one in found),
        "removed": [str(one.path) for one in gone],
    }
    answer(content, _lines(found, gone, args.remove or args.everything), output.json)


def _described(one: Leftover) -> dict[str, Any]:
    return {
        "path": str(one.path),
        "bytes": one.size,
        "age_seconds": round(one.age),
        "host": one.host,
        "writer_lives": one.alive,
    }


def _lines(found: list[Leftover], gone: list[Leftover], removing: bool) -> list[str]:
    lines = []
    for one in found:
        lives = {True: "its writer is running", False: "its writer is dead", None: "its writer is on another host"}
        what = "removed" if one in gone else "kept" if removing else "found"
        lines.append(f"{what}: {one.path} ({size(one.size)}, {duration(one.age)} old, {lives[one.alive]})")
    if not found:
        return ["Nothing was left behind."]
    if not removing:
        lines.append(f"{size(sum(one.size for one in found))} in total. `--remove` removes what is safe to remove.")
    return lines
