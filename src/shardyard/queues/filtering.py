"""What never leaves the server: records without the tags that a group wants, and headers that it has no use for."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from shardyard.model import TAG
from shardyard.model.batch import Batch


def only_tagged(batch: Batch, tags: Sequence[str]) -> Batch:
    """The records with one of these tags; its end is that of the whole batch."""
    wanted = pa.array([tag.encode() for tag in tags], pa.binary())
    chunks = [_has_any(chunk, wanted) for chunk in batch.data["headers"].chunks]
    mask = np.concatenate(chunks) if chunks else np.zeros(0, bool)
    if mask.all():
        return batch
    places = np.array(batch.offsets(), np.int64)[mask]
    return Batch(batch.partition, batch.epoch, batch.first, batch.data.filter(pa.array(mask)), places, batch.end)


def _has_any(headers: pa.MapArray, wanted: pa.Array) -> npt.NDArray[np.bool_]:
    """For each row whether one of its headers is such a tag."""
    if headers.null_count == len(headers):
        return np.zeros(len(headers), bool)
    is_tag = pc.and_(pc.equal(headers.keys, TAG), pc.is_in(headers.items, wanted))
    seen = np.concatenate([[0], np.cumsum(is_tag.to_numpy(zero_copy_only=False))])
    offsets = headers.offsets.to_numpy()  # into keys and items, which are those of the whole array also for a slice
    found: npt.NDArray[np.bool_] = seen[offsets[1:]] > seen[offsets[:-1]]
    return found


def without_header(batch: Batch, name: str) -> Batch:
    """The same records, without a header."""
    column = batch.data.schema.get_field_index("headers")
    field = batch.data.schema.field(column)
    rows = [headers and [h for h in headers if h[0] != name] for headers in batch.data["headers"].to_pylist()]
    return replace(batch, data=batch.data.set_column(column, field, pa.array(rows, field.type)))
