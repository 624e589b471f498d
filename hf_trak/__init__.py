"""Find the training examples that made your model do this: TRAK data attribution for the Hugging Face ecosystem.

Public names are imported when they are first used. `TrakAttributor` (`attributor.py`) is where users begin and where
reading begins: below it are `featurize` (features in a store), `scores` (from features to scores), and under both
`gradient_computers`, `projectors`, `modelout_functions`, `data`, `weights` and `store`. `traker`, with the import
paths `savers`, `score_computers` and `utils`, is the `trak` API. `.importlinter` states which package may import
which.
"""

from typing import TYPE_CHECKING

from hf_trak._lazy import lazy_exports

if TYPE_CHECKING:
    from hf_trak.attributor import TrakAttributor as TrakAttributor
    from hf_trak.callbacks import TrakCallback as TrakCallback
    from hf_trak.config import CurvatureConfig as CurvatureConfig
    from hf_trak.config import TrakConfig as TrakConfig
    from hf_trak.curvature.conjugate_gradients import Refinement as Refinement
    from hf_trak.data.image_text import ImageTextCollator as ImageTextCollator
    from hf_trak.data.streams import StreamedRows as StreamedRows
    from hf_trak.featurize.estimate import estimate as estimate
    from hf_trak.gradient_computers import per_sample_gradients as per_sample_gradients
    from hf_trak.hub import HubCheckpoint as HubCheckpoint
    from hf_trak.hub import load_scores as load_scores
    from hf_trak.hub import pull_index as pull_index
    from hf_trak.hub import push_scores as push_scores
    from hf_trak.hub import with_training_rows as with_training_rows
    from hf_trak.methods import Exact as Exact
    from hf_trak.methods import Index as Index
    from hf_trak.methods import Replay as Replay
    from hf_trak.methods import Rerank as Rerank
    from hf_trak.scores.spans import Span as Span
    from hf_trak.traker.traker import TRAKer as TRAKer
    from hf_trak.version import __version__ as __version__

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "hf_trak.attributor": "TrakAttributor",
        "hf_trak.callbacks": "TrakCallback",
        "hf_trak.config": "CurvatureConfig TrakConfig",
        "hf_trak.curvature.conjugate_gradients": "Refinement",
        "hf_trak.data.image_text": "ImageTextCollator",
        "hf_trak.data.streams": "StreamedRows",
        "hf_trak.featurize.estimate": "estimate",
        "hf_trak.gradient_computers": "per_sample_gradients",
        "hf_trak.hub": "HubCheckpoint load_scores pull_index push_scores with_training_rows",
        "hf_trak.methods": "Exact Index Replay Rerank",
        "hf_trak.scores.spans": "Span",
        "hf_trak.traker.traker": "TRAKer",
        "hf_trak.version": "__version__",
    },
)
