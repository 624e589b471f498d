"""Names under which identities record functions, classes and modules of hf_trak that have moved since.

Code of a library is identified by its name alone. A store that was written before a module moved holds the old name,
so the old one goes on being recorded: otherwise a task whose function calls `hf_trak.utils.vectorize`, say, would seem
to be another task, and the store could not be resumed. Add a line whenever something moves that code of users may
refer to.
"""

RECORDED_NAMES = {
    "hf_trak.data.batch_limits": "hf_trak.batch_limits",
    "hf_trak.data.image_text": "hf_trak.image_text",
    "hf_trak.data.language": "hf_trak.language_data",
    "hf_trak.data.model_inputs": "hf_trak.model_inputs",
    "hf_trak.data.rows": "hf_trak.data",
    "hf_trak.data.streams": "hf_trak.streams",
    "hf_trak.featurize.estimate": "hf_trak.estimation",
    "hf_trak.featurize.estimation": "hf_trak.estimation",
    "hf_trak.featurize.featurized": "hf_trak.featurized",
    "hf_trak.gradient_computers.hooked.computer": "hf_trak.gradient_computers.hooked",
    "hf_trak.gradient_computers.hooked.rules": "hf_trak.gradient_computers.rules",
    "hf_trak.identity.row_digest": "hf_trak.row_digest",
    "hf_trak.runtime.processes": "hf_trak.processes",
    "hf_trak.scores.feature_shards.FeatureShard": "hf_trak.score_computers.streaming.FeatureShard",
    "hf_trak.scores.gram": "hf_trak.score_computers.gram",
    "hf_trak.scores.groups": "hf_trak.groups",
    "hf_trak.scores.ridge": "hf_trak.score_computers.ridge",
    "hf_trak.scores.scored_dataset": "hf_trak.scored_dataset",
    "hf_trak.scores.scorer": "hf_trak.scoring",
    "hf_trak.scores.selection": "hf_trak.selection",
    "hf_trak.scores.spans": "hf_trak.spans",
    "hf_trak.scores.streaming": "hf_trak.score_computers.streaming",
    "hf_trak.scores.topk": "hf_trak.score_computers.topk",
    "hf_trak.store.shard_set": "hf_trak.savers.shard_set",
    "hf_trak.store.shards": "hf_trak.savers.shards",
    "hf_trak.store.store": "hf_trak.savers.store",
    "hf_trak.traker.plugins": "hf_trak.gradient_pipeline",
    "hf_trak.traker.score_computers.basic": "hf_trak.utils",
    "hf_trak.traker.savers.base": "hf_trak.savers.base",
    "hf_trak.traker.savers.mmap_saver": "hf_trak.savers.mmap_saver",
    "hf_trak.traker.savers.mmap_scores": "hf_trak.savers.mmap_saver",
    "hf_trak.traker.savers.safetensors_saver": "hf_trak.savers.safetensors_saver",
    "hf_trak.traker.score_computers.basic": "hf_trak.score_computers.base",
    "hf_trak.traker.score_computers.basic": "hf_trak.score_computers.basic",
    "hf_trak.traker.traker": "hf_trak.traker",
    "hf_trak.traker.utils": "hf_trak.utils",
    "hf_trak.weights.adapters": "hf_trak.adapters",
    "hf_trak.weights.checkpoints": "hf_trak.checkpoints",
}
"""Recorded names by present ones, of modules or of what is in them."""


def recorded_name(name: str) -> str:
    """The name that identities record for what is now called `name`; the longest entry that it begins with counts.

    Args:
        name (`str`):
            Dotted name of a module, class, function or method.

    Returns:
        `str`: `name` itself unless it is listed in [`RECORDED_NAMES`], or lies in a module or class that is.
    """
    if not name.startswith("hf_trak."):
        return name
    listed = name
    while listed:
        if listed in RECORDED_NAMES:
            return RECORDED_NAMES[listed] + name[len(listed) :]
        listed = listed.rpartition(".")[0]
    return name
