"""From a question to score columns, by each method."""

from typing import Literal

from hf_trak.featurize.exact import ExactScores
from hf_trak.featurize.featurized import FeaturizedModel
from hf_trak.featurize.question import Answer, Question
from hf_trak.featurize.replaying import ReplayScores
from hf_trak.featurize.reranking import reranked, two_passes
from hf_trak.featurize.run_replaying import RunReplay
from hf_trak.methods import AnyMethod, Combination, Exact, Index, Replay, Rerank, check_best_rows
from hf_trak.scores.score_files import ScoreFiles
from hf_trak.scores.scored_dataset import weighted_blocks
from hf_trak.scores.scorer import PlannedScores
from hf_trak.store.sealed import content_digest


def planned(
    model: FeaturizedModel, question: Question, method: Index | Exact | Replay | Combination, everywhere: bool = True
) -> PlannedScores:
    """Plan the scores of all training rows, from features, from whole gradients, or from the run.

    Args:
        model: the model and its features.
        question: the targets.
        method: the method.
        everywhere: all training rows in every process, rather than those that fall to this one.
    """
    if isinstance(method, Combination):
        plans = [planned(model, question, one, everywhere) for one in method.methods]
        identity = {"combined": [one.identity for one in plans], "weights": list(method.weights)}
        return PlannedScores(identity, weighted_blocks([one.blocks for one in plans], method.weights))
    if isinstance(method, Replay) and method.of == "run":
        return RunReplay(model, method).plan(question)
    if not isinstance(method, Index):
        scores = ReplayScores(model, method) if isinstance(method, Replay) else ExactScores(model, method)
        return scores.plan(question, everywhere)
    return model.plan(question, everywhere, method.lambda_relative)


def answer(
    model: FeaturizedModel,
    question: Question,
    method: AnyMethod,
    top_k: int | None,
    per: Literal["target", "train"],
) -> Answer:
    """Compute the score columns of [`~hf_trak.TrakAttributor.attribute`]. All processes call this together.

    Args:
        model: the model and its features.
        question: the targets.
        method: how scores are computed.
        top_k: rows to return for each row of the result, from either end; `None` for every score.
        per: whether rows of the result are targets or training rows.

    Raises:
        ValueError: the method finds the best rows of each target alone, and something else is asked for.
        All that the method raises.
    """
    check_best_rows(method, top_k, per)
    if top_k is not None and isinstance(method, Rerank):
        return reranked(model, question, method, top_k)
    assert not isinstance(method, Rerank)  # `check_best_rows` has looked
    if top_k is not None and isinstance(method, Index) and method.first_pass_bytes is not None:
        return two_passes(model, question, method, top_k)
    plan = planned(model, question, method, everywhere=False)
    length = model.train_size if per == "target" else question.m
    # A name for each result: another one never comes to lie beneath a dataset that is still in use.
    digest = content_digest({**plan.identity, "experiment": question.name, "per": per, "top_k": top_k})
    stem = f"per-{per}-{digest}" if top_k is None else f"per-{per}-top-{top_k}-{digest}"
    directory = model.store.output_dir / "scores" / question.name
    files = ScoreFiles(directory, stem, model.processes, model.train_size, question.m)
    columns = files.columns(plan.blocks, None if top_k is None else min(top_k, length), per)
    return Answer(columns, method, lambda: planned(model, question, method).blocks)
