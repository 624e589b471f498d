"""Spark as an engine (the extra `spark`).

    attributor.features.scored_by = SparkEngine(SparkSession.builder.getOrCreate())

Every executor needs hf_trak and the files under the same names. Resources and repeated tasks are as the session's
configuration says: `spark.task.cpus`, `spark.task.maxFailures`.
"""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pyarrow as pa

from hf_trak.engines.engine import failed

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_TOGETHER = 16
"""Results that are fetched at a time. Each time takes Spark some hundredths of a second."""


class SparkEngine:
    """Applies the function in Spark's `mapInArrow`."""

    def __init__(self, session: "SparkSession") -> None:
        """
        Args:
            session: the session that asks.
        """
        self.session = session

    def map(self, function: Callable[[pa.Table], pa.Table], parts: pa.Table) -> Iterator[pa.Table]:
        """Apply a function to each row, see [`~hf_trak.engines.engine.Engine`].

        Raises:
            StoreError: Spark has given a task up.
        """

        from pyspark.errors import PySparkException

        def applied(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            # Results as bytes: their rows stay numbers of Arrow, and need no schema of Spark.
            for batch in batches:
                found, written = function(pa.Table.from_batches([batch])), pa.BufferOutputStream()
                with pa.ipc.new_stream(written, found.schema) as stream:
                    stream.write_table(found)
                yield pa.record_batch({"table": pa.array([written.getvalue().to_pybytes()])})

        rows = self.session.createDataFrame(parts).repartition(parts.num_rows)
        found = rows.mapInArrow(applied, "table binary").persist()
        try:
            found.count()  # all tasks at once: the iterator alone starts one after the other
            for row in found.coalesce(-(-parts.num_rows // _TOGETHER)).toLocalIterator():
                yield pa.ipc.open_stream(row.table).read_all()
        except PySparkException as error:
            raise failed("Spark", error) from error
        finally:
            found.unpersist()
