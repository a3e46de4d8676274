"""Announcements of the pipeline job `fanout` among the records of `events`: they are not forwarded, because the job
stores their posts itself. `events` has them for the history."""

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from shardyard.wire.channels import DELIVERED


def are_announcements(headers: pa.MapArray | pa.ChunkedArray) -> npt.NDArray[np.bool_]:
    """Which records are announcements, by their headers."""
    found = np.zeros(len(headers), np.bool_)
    if headers.null_count == len(headers):
        return found
    if isinstance(headers, pa.ChunkedArray):
        headers = headers.combine_chunks()
    named = np.flatnonzero(np.asarray(pc.equal(headers.keys, DELIVERED)))
    rows = np.searchsorted(headers.offsets.to_numpy(), named, side="right") - 1
    found[rows[(rows >= 0) & (rows < len(found))]] = True
    return found
