"""Every error class of the library, so that callers can catch what they can act on.

The text of each error says what was given, what was expected, and what to do.
"""


class HfTrakError(Exception):
    """Base class of the errors below."""


class ConfigMismatchError(HfTrakError, ValueError):
    """A store on disk was made with a configuration that differs from the one given."""


class CheckpointMismatchError(HfTrakError, ValueError):
    """A `model_id` is already tied to a checkpoint with other weights."""


class StoreError(HfTrakError, RuntimeError):
    """A file is missing, damaged or of an unknown format, or cannot be written."""


class IncompleteStoreError(StoreError):
    """The store lacks rows (or a finalized stage) that the call needs."""


class GradientEngineError(HfTrakError, RuntimeError):
    """An engine cannot compute exact per-sample gradients of a model; names the parameter, the module, the remedy."""


class NonFiniteError(HfTrakError, ValueError):
    """A gradient, feature or score is NaN or infinite; names the sample."""


class SingularGramError(HfTrakError, ValueError):
    """The regularized Gram matrix is not positive definite."""


class HubAccessError(HfTrakError, OSError):
    """A repo, revision or file of the Hub cannot be read or written: it does not exist, access is refused, or the
    connection failed."""


class RefusedIndexError(StoreError):
    """A published index is damaged, hostile or of an unknown format; names the file and the reason."""


class PeerProcessError(HfTrakError, RuntimeError):
    """Another process of the run failed, was killed, or stopped answering."""


class KernelError(HfTrakError, RuntimeError):
    """A CUDA kernel cannot be compiled, loaded or launched, or gave a wrong result; names the way out."""
