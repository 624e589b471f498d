"""Evaluation of attributions: comparison of the effects that scores predict with those that retraining measures.

`intervals.py` chooses subsets of the training rows, `retraining.py` trains on them (`trainer_retraining.py` with
`Trainer`), and `lds.py`, `removal.py` and `mislabelled.py` compute measures, which take plain matrices of scores
`(n_train, n_targets)` of any library. `reliability.py` measures the noise of the retrainings, and `bank.py` keeps them
in a directory that others can use. `tail_patch.py` takes one small training step in place of a retraining.

May import `featurize` and the packages below it.

Start with `lds.py`, whose first function is the measure of the TRAK paper.
"""

from typing import TYPE_CHECKING

from hf_trak._lazy import lazy_exports

if TYPE_CHECKING:
    from hf_trak.evaluation.bank import Bank as Bank
    from hf_trak.evaluation.bank import BankPart as BankPart
    from hf_trak.evaluation.bank import BankScore as BankScore
    from hf_trak.evaluation.bank import evaluate_bank as evaluate_bank
    from hf_trak.evaluation.intervals import Interval as Interval
    from hf_trak.evaluation.intervals import group_sums as group_sums
    from hf_trak.evaluation.intervals import leave_one_out_subsets as leave_one_out_subsets
    from hf_trak.evaluation.intervals import mean_interval as mean_interval
    from hf_trak.evaluation.intervals import random_subsets as random_subsets
    from hf_trak.evaluation.lds import LdsResult as LdsResult
    from hf_trak.evaluation.lds import LeaveOneOutResult as LeaveOneOutResult
    from hf_trak.evaluation.lds import TopKPrecision as TopKPrecision
    from hf_trak.evaluation.lds import compare_lds as compare_lds
    from hf_trak.evaluation.lds import evaluate_lds as evaluate_lds
    from hf_trak.evaluation.lds import leave_one_out_correlation as leave_one_out_correlation
    from hf_trak.evaluation.lds import linear_datamodeling_score as linear_datamodeling_score
    from hf_trak.evaluation.lds import top_k_precision as top_k_precision
    from hf_trak.evaluation.mislabelled import MislabelledResult as MislabelledResult
    from hf_trak.evaluation.mislabelled import mislabel_detection as mislabel_detection
    from hf_trak.evaluation.mislabelled import with_wrong_labels as with_wrong_labels
    from hf_trak.evaluation.reliability import Reliability as Reliability
    from hf_trak.evaluation.reliability import measure_reliability as measure_reliability
    from hf_trak.evaluation.removal import RemovalEffect as RemovalEffect
    from hf_trak.evaluation.removal import RemovalPlan as RemovalPlan
    from hf_trak.evaluation.removal import RemovalResult as RemovalResult
    from hf_trak.evaluation.removal import evaluate_removal as evaluate_removal
    from hf_trak.evaluation.removal import removal_plan as removal_plan
    from hf_trak.evaluation.retraining import masks_and_outputs as masks_and_outputs
    from hf_trak.evaluation.retraining import repeated_outputs as repeated_outputs
    from hf_trak.evaluation.retraining import retrain_on_subsets as retrain_on_subsets
    from hf_trak.evaluation.review import changed_rows as changed_rows
    from hf_trak.evaluation.review import fixed_dataset as fixed_dataset
    from hf_trak.evaluation.review import prove_removal as prove_removal
    from hf_trak.evaluation.trainer_retraining import TrainerRetraining as TrainerRetraining
    from hf_trak.evaluation.trainer_retraining import mask_rows as mask_rows
    from hf_trak.evaluation.trainer_retraining import model_outputs as model_outputs

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "hf_trak.evaluation.bank": "Bank BankPart BankScore evaluate_bank",
        "hf_trak.evaluation.intervals": "Interval group_sums leave_one_out_subsets mean_interval random_subsets",
        "hf_trak.evaluation.lds": "LdsResult LeaveOneOutResult TopKPrecision compare_lds "
        "evaluate_lds leave_one_out_correlation linear_datamodeling_score top_k_precision",
        "hf_trak.evaluation.mislabelled": "MislabelledResult mislabel_detection with_wrong_labels",
        "hf_trak.evaluation.reliability": "Reliability measure_reliability",
        "hf_trak.evaluation.removal": "RemovalEffect RemovalPlan RemovalResult evaluate_removal removal_plan",
        "hf_trak.evaluation.retraining": "masks_and_outputs repeated_outputs retrain_on_subsets",
        "hf_trak.evaluation.review": "changed_rows fixed_dataset prove_removal",
        "hf_trak.evaluation.trainer_retraining": "TrainerRetraining mask_rows model_outputs",
    },
)
