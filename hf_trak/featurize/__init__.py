"""From rows and checkpoints to features in a store, and to the plan of their scores.

`FeaturizedModel` (`featurized.py`) is the base of `TrakAttributor`: start reading there. `Featurizer`
(`featurizer.py`) fills the missing shards of a feature matrix; `definition.py` says what defines
features and how it is compared with what a store recorded; `revising.py` and `estimate.py` hold `exclude`/`extend` and
`hf_trak.estimate`.

May import everything below: scores, data, gradient computers, tasks, projectors, weights, identity, the store. Nothing
here knows of the Hub, reports or the command line.
"""
