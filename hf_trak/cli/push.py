"""`hf-trak push` and `hf-trak pull`: publish an index, and scores, on the Hub; copy a published index."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hf_trak.cli.parser import OutputArguments, answer, option, parse_yaml_and_args
from hf_trak.cli.record import is_copy, remembered
from hf_trak.config import TrakConfig


@dataclass
class PushArguments:
    """The index and the repo. The token is that of `hf auth login`, or that in HF_TOKEN."""

    output_dir: str = option("Directory of the index; may stand first.")
    repo_id: str = option("Dataset repo, `user/name`; created unless it exists.")
    private: bool = option("Create a private repo, and refuse a public one; --no_private for everyone.", True)
    revision: str | None = option("Branch. By default the main one.", None)
    create_pr: bool = option("Open a pull request instead of committing.", False)
    model_name: str | None = option("Model repo that the index belongs to.", None)
    model_revision: str | None = option("Revision of that model repo.", None)
    checkpoints: list[str] | None = option(
        "Model repos of the weights, `user/model@revision`, by ascending model id.", None
    )
    scores: str | None = option("Directory of a run whose scored targets are also published.", None)
    lds: float | None = option("Linear datamodeling score of the index, if it was measured.", None)
    space: str | None = option(
        "Wheel of hf_trak with which the viewer is also published, as a Space of the same name.", None
    )


def run(argv: Sequence[str]) -> None:
    """Publish an index, and the scores of a run.

    Raises:
        ValueError: `checkpoints` has another number of entries than the index has checkpoints.
    """
    args, output = parse_yaml_and_args(
        (PushArguments, OutputArguments),
        argv,
        prog="hf-trak push",
        description="Publish an attribution index as a dataset repo. The same command again resumes.",
    )
    from hf_trak.hub import push_index
    from hf_trak.store.store import FeatureStore

    store = FeatureStore.load(args.output_dir)
    settings, saved = None, dict[str, Any]()  # a copy of an index comes with its own
    if not is_copy(args.output_dir):
        saved = remembered(args.output_dir)
        names = {name: value for name, value in saved.items() if name in TrakConfig.__dataclass_fields__}
        settings = TrakConfig(**{**names, "output_dir": args.output_dir})
    if args.checkpoints is not None and len(args.checkpoints) != len(store.model_ids):
        raise ValueError(
            f"--checkpoints has {len(args.checkpoints)} entries; the index has the model ids {store.model_ids}. "
            "Expected one for each, in this order."
        )
    scored = None
    if args.scores is not None:
        from hf_trak.hub import push_scores
        from hf_trak.hub.scores import check_scores
        from hf_trak.report.run import AttributionRun

        scored = AttributionRun.load(args.scores).scored
        check_scores(scored)  # before anything is published
    commit = push_index(
        store,
        args.repo_id,
        settings=settings,
        private=args.private,
        revision=args.revision,
        create_pr=args.create_pr,
        model_name=args.model_name,
        model_revision=args.model_revision,
        checkpoints=None if args.checkpoints is None else dict(zip(store.model_ids, args.checkpoints, strict=True)),
        lds=args.lds,
    )
    content = {"repo_id": args.repo_id, "commit": commit.oid, "url": commit.commit_url}
    if scored is not None:
        pushed = push_scores(
            scored, args.repo_id, private=args.private, revision=args.revision, index=args.repo_id,
            model_name=args.model_name,
        )  # fmt: skip
        content["scores_commit"] = pushed.oid
    lines = [f"Published: {commit.commit_url}"]
    if args.space is not None:
        from hf_trak.hub.space import push_space

        columns = {name: saved.get(name) for name in ("text_columns", "image_column", "label_column", "max_length")}
        viewer = push_space(args.repo_id, args.space, private=args.private, task=saved.get("task"), **columns)
        content["space_url"] = viewer.repo_url.url
        lines.append(f"Viewer: {viewer.repo_url.url}")
    answer(content, lines, output.json)


@dataclass
class PullArguments:
    """The index and the directory. The token is that of `hf auth login`, or that in HF_TOKEN."""

    repo_id: str = option("Dataset repo of the index; may stand first.")
    output_dir: str = option("Directory into which the index is copied.", "trak")
    revision: str | None = option("Branch, tag or commit.", None)
    local_files_only: bool = option("Use only the cache.", False)


def run_pull(argv: Sequence[str]) -> None:
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
