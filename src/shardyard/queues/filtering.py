"""Filtering batches before they leave the server: records without the tags of a group, and internal headers."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from msgspec import structs

from shardyard.model import TAG
from shardyard.model.batch import Batch


def only_tagged(batch: Batch, tags: Sequence[str]) -> Batch:
    """The records of a batch with at least one of these tags. The end of the batch stays the same."""
    wanted = pa.array([tag.encode() for tag in tags], pa.binary())
    chunks = [_has_any(chunk, wanted) for chunk in batch.data["headers"].chunks]
    mask = np.concatenate(chunks) if chunks else np.zeros(0, bool)
    if mask.all():
        return batch
    offsets = np.array(batch.offsets(), np.int64)[mask]
    return Batch(batch.partition, batch.epoch, batch.first, batch.data.filter(pa.array(mask)), offsets, batch.end)


def _has_any(headers: pa.MapArray, wanted: pa.Array) -> npt.NDArray[np.bool_]:
    """For each row, whether it has one of the tags."""
    import pyarrow.compute as pc  # noqa: PLC0415 it takes 9 MB, and few brokers need it

    if headers.null_count == len(headers):
        return np.zeros(len(headers), bool)
    is_tag = pc.and_(pc.equal(headers.keys, TAG), pc.is_in(headers.items, wanted))
    seen = np.concatenate([[0], np.cumsum(is_tag.to_numpy(zero_copy_only=False))])
    offsets = headers.offsets.to_numpy()  # into keys and items, which a slice shares with the whole array
    found: npt.NDArray[np.bool_] = seen[offsets[1:]] > seen[offsets[:-1]]
    return found


def without_header(batch: Batch, name: str) -> Batch:
    """The same records without the header of this name."""
    column = batch.data.schema.get_field_index("headers")
    field = batch.data.schema.field(column)
    rows = [headers and [h for h in headers if h[0] != name] for headers in batch.data["headers"].to_pylist()]
    return structs.replace(batch, content=batch.data.set_column(column, field, pa.array(rows, field.type)))
