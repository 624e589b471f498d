"""`hf-trak verify-store`: check every byte of a directory."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

from hf_trak.cli.parser import OutputArguments, answer, parse_yaml_and_args
from hf_trak.curvature.files import verify_curvatures
from hf_trak.errors import IncompleteStoreError
from hf_trak.store.shards import Finding
from hf_trak.store.store import FeatureStore
from hf_trak.store.verification import verify_store


@dataclass
class VerifyArguments:
    """The directory to check."""

    output_dir: str = field(
        metadata={"help": "Directory of a store, an index, a run, a TRAKer or retrainings; may stand first."}
    )
    all_files: bool = field(default=False, metadata={"help": "Also list intact files."})


def run(argv: Sequence[str]) -> int:
    """Check every byte of a directory. Returns the exit status, 1 if anything is damaged."""
    args, output = parse_yaml_and_args(
        (VerifyArguments, OutputArguments),
        argv,
        prog="hf-trak verify-store",
        description="Check every byte of a directory that hf_trak wrote against the checksums and identities in it. "
        "Shows what is damaged or missing, and how to compute it again. The exit status is 1 if anything is damaged.",
    )
    directory = Path(args.output_dir)
    findings = list({(one.path, one.state): one for one in findings_of(directory)}.values())
    counts: Counter[str] = Counter(one.state for one in findings)
    content: dict[str, Any] = {
        "output_dir": str(directory),
        "files": [
            {"path": str(one.path), "state": one.state, "detail": one.detail, "remedy": one.remedy} for one in findings
        ],
        "counts": dict(counts),
    }
    answer(content, _lines(findings, counts, args.all_files), output.json)
    return 1 if counts["damaged"] else 0


def findings_of(directory: Path) -> Iterable[Finding]:
    """Check a directory of any kind.

    Returns:
        The findings, one for each file.

    Raises:
        IncompleteStoreError: hf_trak wrote nothing here.
    """
    checks = list(_checks(directory))
    if not checks:
        raise IncompleteStoreError(
            f"{str(directory)!r} holds nothing that hf_trak wrote. Expected the output directory of a run, an index, "
            "a report run, a `save_dir` of TRAKer, or a directory of retrainings. Name one of those."
        )
    return chain.from_iterable(checks)


def _checks(directory: Path) -> Iterator[Iterable[Finding]]:
    from hf_trak.evaluation.retraining_files import verify_retraining
    from hf_trak.report.run_record import verify_run
    from hf_trak.traker.savers.mmap_saver import verify_mmap
    from hf_trak.traker.savers.safetensors_saver import verify_traker

    if (directory / FeatureStore.CONFIG_FILE).exists():
        yield verify_store(directory)
        yield verify_curvatures(directory)
        yield verify_traker(directory)
        for revision in sorted(directory.glob("revisions/*")):
            for store in (revision, revision / "added"):
                if (store / FeatureStore.CONFIG_FILE).exists():
                    yield verify_store(store)
    if (directory / "metadata.json").exists():
        yield verify_mmap(directory)
    if (directory / "retraining.json").exists():
        yield verify_retraining(directory)
    runs = sorted(path for path in [directory, *directory.glob("scores/*")] if _is_run(path))
    yield from map(verify_run, runs)


def _is_run(path: Path) -> bool:
    return (path / "run.json").exists() or (path / "scored").is_dir() or any(path.glob("parts-*"))


def _lines(findings: list[Finding], counts: Counter[str], every: bool) -> list[str]:
    lines = []
    for one in findings:
        if every or one.state != "intact":
            detail = f": {one.detail}" if one.detail else ""
            remedy = f" → {one.remedy}" if one.remedy else ""
            lines.append(f"{one.state.upper():<9} {one.path}{detail}{remedy}")
    summary = ", ".join(
        f"{counts[state]} {state}" for state in ("intact", "damaged", "missing", "unchecked", "leftover")
    )
    return [*lines, summary]
