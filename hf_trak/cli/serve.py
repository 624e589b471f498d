"""`hf-trak serve`: answer questions about an index or a run on a page in the browser."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from datasets import Dataset, Features

from hf_trak.attributor import TrakAttributor
from hf_trak.cli.build import Built, build, build_from_index, quiet
from hf_trak.cli.parser import DataArguments, ModelArguments, OutputArguments, answer, option, parse_yaml_and_args
from hf_trak.cli.record import RECORD, is_copy, remembered
from hf_trak.cli.stored_rows import training_rows
from hf_trak.config import TrakConfig
from hf_trak.errors import HubAccessError
from hf_trak.featurize.reranking import row_source
from hf_trak.hub.remote_rows import RemoteRows
from hf_trak.modelout_functions import infer_task
from hf_trak.report.run import AttributionRun
from hf_trak.report.run_record import find_run
from hf_trak.store.store import FeatureStore
from hf_trak.viewer.app import require_gradio
from hf_trak.viewer.index_session import IndexSession
from hf_trak.viewer.server import serve
from hf_trak.viewer.session import RunSession, Session
from hf_trak.viewer.target_form import TargetForm


@dataclass
class ServeArguments:
    """The index or run, and where the page is served. With HF_TRAK_VIEWER_AUTH=user:password visitors log in."""

    index: str = option(
        "Output directory of `hf-trak featurize`, published index or copy of one, or directory of a run; "
        "may stand first."
    )
    index_revision: str | None = option("Branch, tag or commit of a published index.", None)
    host: str = option(
        "Address to listen at; 0.0.0.0 opens the page to everyone who can reach this machine.", "127.0.0.1"
    )
    port: int = option("Port to listen at. The environment variable GRADIO_SERVER_PORT goes first.", 7860)
    public_rows: bool = option(
        "Read training rows of the Hub without a token, so that private ones are never shown.", False
    )
    title: str | None = option("Heading of the page.", None)

    def __post_init__(self) -> None:
        if not 0 < self.port < 65536:
            raise ValueError(f"`port` is {self.port}. Expected a number from 1 to 65535.")


def run(argv: Sequence[str]) -> None:
    """Serve the page until the process is interrupted."""
    if not {"-h", "--help"} & set(argv):  # before an index is loaded
        require_gradio()
    session, args, as_json = opened(argv)
    port = int(os.environ.get("GRADIO_SERVER_PORT") or args.port)

    def started(url: str) -> None:
        content = {"url": url, "train_rows": session.rows.count}
        answer(content, [f"The viewer is at {url} (Ctrl-C ends it)."], as_json)

    serve(session, args.host, port, started=started)


def opened(argv: Sequence[str]) -> tuple[Session, ServeArguments, bool]:
    """Parse arguments, and open what they name.

    Returns:
        The session, the arguments, and whether output is JSON.

    Raises:
        Exception: any error of loading the index, the model and the rows, or the run.
    """
    kinds = (ServeArguments, ModelArguments, DataArguments, TrakConfig, OutputArguments)
    parse = partial(
        parse_yaml_and_args,
        kinds,
        argv,
        prog="hf-trak serve",
        description="Answer questions about an index on a page in the browser: type or upload a target, and see the "
        "training rows that helped and harmed it. Of a saved run, the page shows its targets.",
    )
    args, model_args, data, trak, output = parse()
    directory = Path(args.index)
    if directory.is_dir() and not (directory / FeatureStore.CONFIG_FILE).exists():
        return _of_run(args, data), args, output.json
    own = directory.is_dir() and not is_copy(args.index) and (directory / RECORD).is_file()
    if own:
        _, model_args, data, trak, _ = parse(defaults={**remembered(args.index), "output_dir": args.index})
    quiet()
    if not own:
        return _of_index(args, model_args, data, trak), args, output.json
    built = build(model_args, data, trak)
    return _session(args, data, built, _form_of_rows(built, model_args, data)), args, output.json


def _of_run(args: ServeArguments, data: DataArguments) -> RunSession:
    train = None if data.dataset_name is None else training_rows(data, None)
    directory = find_run(args.index)
    title = args.title or f"Which training rows did this? {directory.name}"
    return RunSession(AttributionRun.load(directory, train), title, [directory, *_roots(data)])


def _of_index(args: ServeArguments, model_args: ModelArguments, data: DataArguments, trak: TrakConfig) -> IndexSession:
    """Open a published index, or a directory without a record."""
    local = data.dataset_name is not None and Path(data.dataset_name).exists()
    forms = list[TargetForm]()

    def example(attributor: TrakAttributor, task: str) -> Dataset:
        found = _first_row(args, attributor, data)
        forms.append(_form(attributor, task, data, None if found is None else found.features))
        return found if forms[0].as_json and found is not None else forms[0].example()

    built = build_from_index(
        args.index, model_args, data, trak, example, with_rows=local, rerank=True, revision=args.index_revision
    )
    if local:
        forms.append(_form_of_rows(built, model_args, data))
    return _session(args, data, built, forms[0])


def _first_row(args: ServeArguments, attributor: TrakAttributor, data: DataArguments) -> Dataset | None:
    """Read a row of the repo of the training rows, as it is stored. Rows that cannot be read are not shown later."""
    known = row_source(attributor.features)
    if isinstance(known, RemoteRows):
        known.token = False if args.public_rows else known.token
        rows = RemoteRows(known.repo_id, known.config, known.split, known.revision, token=known.token)
    elif data.dataset_name is not None:
        token = False if args.public_rows else None
        rows = RemoteRows(data.dataset_name, data.dataset_config_name, data.train_split or "train", token=token)
    else:
        return None
    try:
        return rows.select([0])
    except HubAccessError:
        if data.dataset_name is not None:
            raise
        attributor.train_dataset.remote = None
        return None


def _form_of_rows(built: Built, model_args: ModelArguments, data: DataArguments) -> TargetForm:
    task = model_args.task or infer_task(built.attributor.model)
    return _form(built.attributor, task, data, training_rows(data, 1).features)


def _form(attributor: TrakAttributor, task: str, data: DataArguments, features: Features | None) -> TargetForm:
    names = getattr(getattr(attributor.model, "config", None), "id2label", None)
    columns: dict[str, Any] = {
        "text_columns": data.text_columns, "image_column": data.image_column, "label_column": data.label_column
    }  # fmt: skip
    return TargetForm.find(task, features, names, **columns)


def _session(args: ServeArguments, data: DataArguments, built: Built, form: TargetForm) -> IndexSession:
    title = args.title or f"Which training rows did this? {Path(args.index).name}"
    session = IndexSession(built.attributor, form, built.preparation.prepare, title=title, roots=_roots(data))
    session.warm_up()
    return session


def _roots(data: DataArguments) -> list[Path]:
    """List the directories of local training rows. Image files of rows may be read below them."""
    if data.dataset_name is None or not Path(data.dataset_name).exists():
        return []
    path = Path(data.dataset_name)
    return [path if path.is_dir() else path.parent]
