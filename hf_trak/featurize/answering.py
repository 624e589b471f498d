"""From a question to score columns, by each method."""

from typing import Literal

from hf_trak.engines.engine import Engine, best_of_shards, gram_of_shards, over_shards
from hf_trak.featurize.exact import ExactScores
from hf_trak.featurize.featurized import FeaturizedModel
from hf_trak.featurize.question import Answer, Question
from hf_trak.featurize.replaying import ReplayScores
from hf_trak.featurize.reranking import reranked, two_passes
from hf_trak.featurize.run_replaying import RunReplay
from hf_trak.methods import AnyMethod, Combination, Exact, Index, Replay, Rerank, check_best_rows
from hf_trak.scores.gram_sample import sample_size, sampled_gram
from hf_trak.scores.score_files import ScoreFiles, top_k_columns
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
        ValueError: the method finds the best rows of each target alone, and something else is asked for; or an engine
            is set, and something else than these by the index, in one process.
        All that the method raises.
    """
    check_best_rows(method, top_k, per)
    if model.scored_by is not None:
        return _by_engine(model, model.scored_by, question, method, top_k, per)
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


def _by_engine(
    model: FeaturizedModel,
    engine: Engine,
    question: Question,
    method: AnyMethod,
    top_k: int | None,
    per: Literal["target", "train"],
) -> Answer:
    """Let an engine find the best rows of the index, and XᵀX where the store has none."""
    whole = isinstance(method, Index) and method.first_pass_bytes is None
    if not whole or top_k is None or per != "target" or model.processes.num_processes > 1:
        raise ValueError(
            f"`features.scored_by` is {type(engine).__name__}, and {method} is asked for with `top_k={top_k}` and "
            f"`per={per!r}` in {model.processes.num_processes} processes. Expected the best rows of each target by "
            'the index, in one process. Set `method="index"`, or `features.scored_by = None`.'
        )
    assert isinstance(method, Index)
    store, scorer = model.store, model.scorer_with(method.lambda_relative)
    shards = [store.train(model_id) for model_id in question.ids]
    size = sample_size(store.train_size, store.proj_dim)
    for model_id, of_checkpoint in zip(question.ids, shards, strict=True):
        if scorer.solvers.choice(model_id).kind == "primal" and store.read_gram(model_id) is None:
            if size is None:
                store.write_gram(model_id, gram_of_shards(engine, of_checkpoint), store.train_size)
            else:
                found = sampled_gram(store, model_id, size, over_shards(engine, of_checkpoint), scorer.device)
                store.write_gram(model_id, found.matrix, found.n, found.sample, found.spread)
    targets = model.precondition(question, method.lambda_relative).rows
    ends = best_of_shards(engine, shards, targets, min(top_k, store.train_size))
    return Answer(top_k_columns(*ends), method, lambda: planned(model, question, method).blocks)
