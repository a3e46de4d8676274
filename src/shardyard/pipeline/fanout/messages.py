"""The records that announcements are: pure functions from frame to frame."""

from collections.abc import Callable, Iterable, Iterator

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812 as everybody calls it

from shardyard.pipeline.fanout.runs import Run, id_of
from shardyard.wire.channels import DELIVERED, ChannelEvent, encode_event
from shardyard.wire.inbox import InboxEntry, encode_entry

MESSAGES = "key binary, value binary, id string"
"""Direct messages, as records of `inbox`."""


def event_value(run: Run) -> bytes:
    """The event, which is the same for all channels."""
    return encode_event(ChannelEvent(run.first_id, run.sender, "", 0, run.at, run.text))


def events(channels: DataFrame, run: Run) -> DataFrame:
    """The event of each channel (a column `name`), as a record of `events`. Its header says that it is delivered
    without those who forward events."""
    header = F.struct(F.lit(DELIVERED).alias("name"), F.lit(run.run.encode()).alias("value"))
    return channels.select(
        F.col("name").cast("binary").alias("key"),
        F.lit(event_value(run)).alias("value"),
        F.array(header).alias("headers"),
    )


def of_run(records: DataFrame, run: Run) -> DataFrame:
    """The events of a run among records of `events`."""
    mine = F.struct(F.lit(DELIVERED).alias("name"), F.lit(run.run.encode()).alias("value"))
    return records.where(F.array_contains("headers", mine))


def messages(users: DataFrame, run: Run, tasks: int) -> DataFrame:
    """The message to each user (a column `name`), as `MESSAGES`. Each has an id of its own; `tasks` make them."""
    return users.select("name").repartition(tasks).mapInArrow(_encoder(run, tasks), MESSAGES)


def _encoder(run: Run, tasks: int) -> Callable[[Iterable[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    def encode(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        context = TaskContext.get()
        number = context.partitionId() if context is not None else 0
        for batch in batches:
            users = batch["name"].to_pylist()
            ids = [id_of(run.first_id, number + tasks * n) for n in range(len(users))]
            number += tasks * len(users)
            values = [
                encode_entry(InboxEntry(id_, run.sender, user, "", 0, run.at, run.text))
                for id_, user in zip(ids, users, strict=True)
            ]
            yield pa.RecordBatch.from_arrays(
                [batch["name"].cast(pa.binary()), pa.array(values, pa.binary()), pa.array(map(str, ids), pa.string())],
                ["key", "value", "id"],
            )

    return encode
