"""`hf-trak pull`."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from hf_trak.cli.arguments import OutputArguments
from hf_trak.cli.output import answer
from hf_trak.cli.parser import parse_yaml_and_args


@dataclass
class PullArguments:
    """Which index, and where to. The token is that of `hf auth login`, or of HF_TOKEN."""

    repo_id: str = field(metadata={"help": "Dataset repo of the index; may stand first."})
    output_dir: str = field(default="trak", metadata={"help": "Directory to copy it into."})
    revision: str | None = field(default=None, metadata={"help": "Branch, tag or commit."})
    local_files_only: bool = field(default=False, metadata={"help": "Use the cache alone."})


def run(argv: Sequence[str]) -> None:
    """Copy a published index."""
    args, output = parse_yaml_and_args(
        (PullArguments, OutputArguments),
        argv,
        prog="hf-trak pull",
        description="Copy a published attribution index into a directory, checking every file.",
    )
    from hf_trak.hub import pull_index

    store = pull_index(
        args.repo_id, args.output_dir, revision=args.revision, local_files_only=args.local_files_only
    )  # fmt: skip
    content = {"output_dir": str(args.output_dir), "checkpoints": store.model_ids, "config": store.config}
    answer(content, [f"Index: {args.output_dir}, checkpoints {store.model_ids}"], output.json)
