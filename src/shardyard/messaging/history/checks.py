"""What every database can store."""

from shardyard.model.checks import check_int64, check_text
from shardyard.wire.inbox import InboxEntry, Mark


def check_storable(entry: InboxEntry) -> None:
    """Refuse (`InvalidValue`) an entry with names or ids that a database can't take. Its text and its device may be
    anything, because they are stored as bytes."""
    check_text("sender", entry.sender)
    check_text("recipient", entry.recipient)
    check_int64("id", entry.id, at_least=0)
    if isinstance(entry.content, Mark):
        check_int64("upto", entry.content.upto, at_least=0)
