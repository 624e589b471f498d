"""Curvatures that were fitted before: read for reports and comparisons, without the weights of the model."""

from collections.abc import Sequence

from hf_trak.curvature.curvature import Curvature, identity_curvature
from hf_trak.curvature.files import CURVATURE_FILE, CurvatureFiles
from hf_trak.curvature.report import CurvatureReport
from hf_trak.errors import StoreError
from hf_trak.featurize.exact import ExactScores
from hf_trak.store.sealed import read_sealed

_SAMPLE = ("rows", "sample")


def fitted_curvature(exact: ExactScores, model_id: int) -> Curvature:
    """Read the curvature of a checkpoint, whichever rows it was fitted to.

    Args:
        exact (`ExactScores`): the model and its configuration.
        model_id (`int`): the checkpoint.

    Raises:
        StoreError: none is fitted, or a file of it is damaged.
        ConfigMismatchError: it was fitted to other weights or parameters, or with another kind, labels or seed.
        IncompleteStoreError: there is no checkpoint of this id.
    """
    if exact.kind == "identity":
        return identity_curvature(exact.model.layout)
    expected = exact.identity(model_id, exact.sample())
    directory = exact.model.store.curvature_dir(model_id, expected)  # that of a published one, if it fits
    path = directory / CURVATURE_FILE
    if not path.exists():
        raise StoreError(
            f"{directory} holds no curvature of checkpoint {model_id}. Expected a fitted one. Call `fit_curvature()` "
            "first."
        )
    if directory == exact.directory(model_id):
        recorded = read_sealed(path).get("identity", {})
        expected |= {name: recorded[name] for name in _SAMPLE if name in recorded}
    return CurvatureFiles(directory, expected).read()


def curvature_report(exact: ExactScores, model_id: int) -> CurvatureReport:
    """Report on the curvature of a checkpoint. Raises as [`fitted_curvature`].

    Args:
        exact (`ExactScores`): the model and its configuration.
        model_id (`int`): the checkpoint.

    Raises:
        ValueError: the configured curvature is the identity, of which there is nothing to report.
    """
    if exact.kind == "identity":
        raise ValueError(
            "`curvature` is 'identity', which is fitted to nothing. Expected another one for a report. Set "
            "`curvature='ekfac'`."
        )
    return CurvatureReport.of(fitted_curvature(exact, model_id), exact.damping)


def log_reports(exact: ExactScores, model_ids: Sequence[int]) -> None:
    """Log short reports on the curvatures of some checkpoints, in the main process."""
    if exact.kind == "identity" or not exact.model.processes.is_main_process:
        return
    for model_id in model_ids:
        curvature_report(exact, model_id).log(f"Curvature of checkpoint {model_id}")
