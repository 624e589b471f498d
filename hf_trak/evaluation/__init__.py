"""Evaluation of attributions: comparison of the effects that scores predict with those that retraining measures.

`intervals.py` chooses subsets of the training rows, `retraining.py` trains on them (`trainer_retraining.py` with
`Trainer`), and `lds.py`, `removal.py` and `mislabelled.py` compute measures, which take plain matrices of scores
`(n_train, n_targets)` of any library. `reliability.py` measures the noise of the retrainings, and `bank.py` keeps them
in a directory that others can use. `tail_patch.py` takes one small training step in place of a retraining.

May import `featurize` and the packages below it.

Start with `lds.py`, whose first function is the measure of the TRAK paper.
"""

from hf_trak.evaluation.bank import Bank, BankPart, BankScore, evaluate_bank
from hf_trak.evaluation.intervals import Interval, group_sums, leave_one_out_subsets, mean_interval, random_subsets
from hf_trak.evaluation.lds import (
    LdsResult,
    LeaveOneOutResult,
    TopKPrecision,
    compare_lds,
    evaluate_lds,
    leave_one_out_correlation,
    linear_datamodeling_score,
    top_k_precision,
)
from hf_trak.evaluation.mislabelled import MislabelledResult, mislabel_detection, with_wrong_labels
from hf_trak.evaluation.reliability import Reliability, measure_reliability, repeated_outputs
from hf_trak.evaluation.removal import RemovalEffect, RemovalPlan, RemovalResult, evaluate_removal, removal_plan
from hf_trak.evaluation.retraining import masks_and_outputs, retrain_on_subsets
from hf_trak.evaluation.trainer_retraining import TrainerRetraining, mask_rows, model_outputs

__all__ = [
    "Bank",
    "BankPart",
    "BankScore",
    "Interval",
    "LdsResult",
    "LeaveOneOutResult",
    "MislabelledResult",
    "Reliability",
    "RemovalEffect",
    "RemovalPlan",
    "RemovalResult",
    "TopKPrecision",
    "TrainerRetraining",
    "compare_lds",
    "evaluate_bank",
    "evaluate_lds",
    "evaluate_removal",
    "group_sums",
    "leave_one_out_correlation",
    "leave_one_out_subsets",
    "linear_datamodeling_score",
    "mask_rows",
    "masks_and_outputs",
    "mean_interval",
    "measure_reliability",
    "mislabel_detection",
    "model_outputs",
    "random_subsets",
    "removal_plan",
    "repeated_outputs",
    "retrain_on_subsets",
    "top_k_precision",
    "with_wrong_labels",
]
