"""Ray Data as an engine (the extra `ray`).

    ray.init()  # or a cluster
    attributor.features.scored_by = RayEngine(num_cpus=1)

Every node needs hf_trak and the files under the same names. Resources are arguments of `ray.data.Dataset.map_batches`;
tasks whose processes die are repeated by Ray, and others as `ray.data.DataContext` says.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pyarrow as pa

from hf_trak.engines.engine import failed
from hf_trak.runtime.checks import required


class RayEngine:
    """Applies the function in tasks of Ray Data."""

    def __init__(self, **options: Any) -> None:
        """
        Args:
            options: arguments of `ray.data.Dataset.map_batches`, such as `num_cpus`, `memory` and `compute`.

        Raises:
            ModuleNotFoundError: Ray is not installed.
        """
        self._data = required("ray.data", "`RayEngine` needs Ray Data. Install it with `pip install 'ray[data]'`.")
        self.options = {"batch_size": None, **options}

    def map(self, function: Callable[[pa.Table], pa.Table], parts: pa.Table) -> Iterator[pa.Table]:
        """Apply a function to each row, see [`~hf_trak.engines.engine.Engine`].

        Raises:
            StoreError: Ray has given a task up.
        """
        from ray.exceptions import RayError

        blocks = self._data.from_arrow([parts.slice(number, 1) for number in range(parts.num_rows)])
        try:
            found = blocks.map_batches(function, batch_format="pyarrow", **self.options)
            yield from found.iter_batches(batch_size=None, batch_format="pyarrow")
        except RayError as error:
            raise failed("Ray", error) from error
