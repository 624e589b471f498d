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

_TOGETHER, _BYTES = 16, 2**24
"""Results that are fetched at a time, and the bytes that several may have. Each time takes Spark some hundredths of a
second, and `spark.driver.maxResultSize` bounds what it fetches."""


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
        from py4j.protocol import Py4JJavaError
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
            # All tasks at once: the iterator alone starts one after the other.
            largest = found.selectExpr("max(length(table)) AS size").collect()[0].size
            together = min(_TOGETHER, max(1, _BYTES // largest))
            for row in found.coalesce(-(-parts.num_rows // together)).toLocalIterator():
                yield pa.ipc.open_stream(row.table).read_all()
        except (PySparkException, Py4JJavaError) as error:
            raise failed("Spark", error) from error
        finally:
            found.unpersist()
