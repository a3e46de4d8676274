"""Tracking records that are acknowledged out of order, to commit the part of a batch that is done."""

from collections.abc import Sequence


class InFlight:
    """The records of one batch, each acknowledged when it is done, in any order.

    A group commits one position per partition: everything before it is done. So only the done prefix of a batch can be
    committed; what is acknowledged behind a record that is not done is redelivered if its owner dies.
    """

    def __init__(self, offsets: Sequence[int], end: int) -> None:
        """`offsets`: of the records, ascending. `end`: the offset to commit when all of them are done."""
        self._offsets = offsets
        self._end = end
        self._done = bytearray(len(offsets))
        self._prefix = 0

    def acknowledge(self, index: int) -> None:
        """The record at this index of the batch is done. Acknowledging it twice changes nothing."""
        self._done[index] = 1

    @property
    def prefix(self) -> int:
        """How many records from the front on are done."""
        while self._prefix < len(self._done) and self._done[self._prefix]:
            self._prefix += 1
        return self._prefix

    @property
    def committable(self) -> int | None:
        """The offset up to which the batch can be committed; None if nothing from the front on is done."""
        if (prefix := self.prefix) == len(self._done):
            return self._end
        return self._offsets[prefix - 1] + 1 if prefix else None
