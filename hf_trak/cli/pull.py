"""`hf-trak pull`: copy a published index into a directory."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from hf_trak.cli.parser import OutputArguments, answer, parse_yaml_and_args


@dataclass
class PullArguments:
    """The index and the directory. The token is that of `hf auth login`, or that in HF_TOKEN."""

    repo_id: str = field(metadata={"help": "Dataset repo of the index; may stand first."})
    output_dir: str = field(default="trak", metadata={"help": "Directory into which the index is copied."})
    revision: str | None = field(default=None, metadata={"help": "Branch, tag or commit."})
    local_files_only: bool = field(default=False, metadata={"help": "Use only the cache."})


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
