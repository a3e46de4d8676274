"""fanout: an announcement to very many channels or users, straight into the partitions of `inbox`.

To users, it is a direct message to each. To channels, it is an event of each, which takes two steps:

1. The events are appended to `events`, where the history finds them for members who are offline. They have a header,
   by which coordinators and workers leave them alone.
2. Their posts are appended to the partitions of `inbox` that have online members, by the routing table as it is when
   the events are durable. So whoever joined or came online before gets it.

Each step is stored once, however often it is run: see `pipeline.source.staging`. Step 2 reads what step 1 stored.

The events could also be left to coordinators and workers. But then millions of them would be in the way of all others.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from pyspark.sql import DataFrame, Observation, SparkSession
from pyspark.sql import functions as F  # noqa: N812 as everybody calls it

from shardyard.fanout.routing import Snapshot
from shardyard.log.router import current_topic
from shardyard.model import InvalidValue, TooLarge
from shardyard.pipeline.blocking import BlockingLog, blocking
from shardyard.pipeline.fanout.audience import check_names
from shardyard.pipeline.fanout.messages import event_value, events, messages, of_run
from shardyard.pipeline.fanout.routes import RoutingSource, posts
from shardyard.pipeline.fanout.runs import MAX_RECIPIENTS, Announcement, Run, RunFile, first_id, new_run
from shardyard.pipeline.routing.routing import current_ends
from shardyard.pipeline.source.offset_lookup import topic_spans
from shardyard.pipeline.source.offsets import TopicOffsets, latest
from shardyard.pipeline.source.options import absolute
from shardyard.pipeline.source.staging import staging_folder
from shardyard.pipeline.spark_errors import translate_spark_errors
from shardyard.registry import registry_exists
from shardyard.wire.channels import EVENTS, MEMBERS, PRESENCE
from shardyard.wire.inbox import TOPIC

TASKS = 8
"""That encode direct messages."""
_EVENTS = "partition int, epoch long, offset long, key binary, headers array<struct<name string, value binary>>"

OnStep = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class FanoutRun:
    """The result of a run."""

    run: str
    audience: str
    recipients: int
    """Channels or users."""
    records: int
    """Stored in `inbox`: one for each user, or for each channel and inbox partition with online members of it."""
    repeated: bool
    """The run was finished before: nothing was stored this time."""


def fanout(
    spark: SparkSession,
    log: str,
    registry: str,
    announcement: Announcement,
    names: DataFrame,
    *,
    routing: Path | str | None = None,
    staging: str | None = None,
    on_step: OnStep = lambda _: None,
) -> FanoutRun:
    """Send an announcement to `names` (channels or users, in a column `name`, each once), or finish a run that was
    interrupted. `routing`: the folder of a routing snapshot, needed for channels. `registry`: that of the messaging
    servers, among whose ids those of the announcement are unique."""
    url = absolute(log)
    if not registry_exists(registry):
        raise InvalidValue("registry", registry, "the registry of the messaging servers")
    if announcement.audience == "channels":
        if routing is None:
            raise InvalidValue("routing", routing, "the folder of a routing snapshot")
        Snapshot.open(routing)  # raises before anything is stored
    file = RunFile(staging_folder(url, staging), announcement.run)
    with file.exclusive(), blocking(url) as opened, translate_spark_errors():
        opened.wait(current_topic(opened.log, TOPIC))
        return _Fanout(spark, url, staging, opened, file, routing, on_step).run(announcement, names, registry)


class _Fanout:
    def __init__(
        self,
        spark: SparkSession,
        url: str,
        staging: str | None,
        opened: BlockingLog,
        file: RunFile,
        routing: Path | str | None,
        on_step: OnStep,
    ) -> None:
        self._spark = spark
        self._url = url
        self._staging = staging
        self._opened = opened
        self._file = file
        self._routing = routing
        self._on_step = on_step

    def run(self, announcement: Announcement, names: DataFrame, registry: str) -> FanoutRun:
        run = self._file.load(announcement)
        if run is not None and run.finished:
            return FanoutRun(run.run, run.audience, run.recipients or 0, run.records or 0, repeated=True)
        self._on_step(f"reading the {announcement.audience}")
        count = check_names(names, announcement.audience)
        if count > MAX_RECIPIENTS:
            raise TooLarge("recipients", count, MAX_RECIPIENTS)
        if run is None:
            run = new_run(
                announcement, self._opened.wait(first_id(registry, announcement.run)), self._events_end(announcement)
            )
            self._file.save(run)
        stored = self._to_users(run, names) if run.audience == "users" else self._to_channels(run, names)
        self._file.finish(run, *stored)
        return FanoutRun(run.run, run.audience, *stored, repeated=False)

    def _events_end(self, announcement: Announcement) -> TopicOffsets | None:
        if announcement.audience == "users":
            return None
        return latest(self._opened.wait(topic_spans(self._opened.log, [EVENTS]))).topics[EVENTS]

    def _to_users(self, run: Run, users: DataFrame) -> tuple[int, int]:
        self._on_step("storing the messages")
        stored = self._write(messages(users, run, TASKS), TOPIC, run)
        return stored, stored

    def _to_channels(self, run: Run, channels: DataFrame) -> tuple[int, int]:
        self._on_step("storing the events")
        self._write(events(channels, run), EVENTS, run)
        # Only now: whoever joined or came online before the events were durable has to get them.
        source = self._routing_source()
        self._on_step("storing the posts in inbox partitions with online members")
        found = self._stored_events(run)
        records = posts(found, source).withColumn("value", F.lit(event_value(run)))
        return found.count(), self._write(records, TOPIC, run, partitioner="column")

    def _routing_source(self) -> RoutingSource:
        ends = self._opened.wait(current_ends(self._opened.log))
        inbox = self._opened.wait(current_topic(self._opened.log, TOPIC))
        if len(ends[PRESENCE]) != inbox.receiving:
            expected = f"{inbox.receiving}, as {inbox.name!r} has: try again when servers have changed it"
            raise InvalidValue(f"partitions of {PRESENCE!r}", len(ends[PRESENCE]), expected)
        folder = str(Path(str(self._routing)).absolute())
        return RoutingSource(self._url, folder, tuple(ends[MEMBERS]), tuple(ends[PRESENCE]), inbox)

    def _stored_events(self, run: Run) -> DataFrame:
        """The events of the run, with the columns `routes.EVENTS`."""
        spans = self._opened.wait(topic_spans(self._opened.log, [EVENTS]))
        if run.events is None or run.events.epoch != spans[EVENTS].epoch:
            raise InvalidValue("topic", EVENTS, "the one that the run began with: it was recreated since")
        ends = latest(spans).topics[EVENTS]
        bounds = {
            option: json.dumps({EVENTS: dict(enumerate(at.offsets))})
            for option, at in (("startingOffsets", run.events), ("endingOffsets", ends))
        }
        reader = self._spark.read.format("shardyard").schema(_EVENTS).options(log=self._url, topics=EVENTS, **bounds)
        return reader.load().transform(of_run, run)

    def _write(self, records: DataFrame, topic: str, run: Run, **options: str) -> int:
        """Store records once, however often it is done. Returns how many there are."""
        seen = Observation()
        if self._staging is not None:
            options["staging"] = self._staging
        counted = records.observe(seen, F.count("*").alias("records"))
        writer = counted.write.format("shardyard").options(log=self._url, topic=topic, producer=f"fanout {run.run}")
        writer.options(**options).mode("append").save()
        return int(seen.get["records"])
