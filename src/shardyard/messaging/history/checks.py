"""What every database can store."""

from shardyard.messaging.history.channel_port import ChannelPost, MemberChange
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


def check_post(post: ChannelPost) -> None:
    """Refuse (`InvalidValue`) a post that a database can't take. Its sender and text are stored as bytes."""
    check_text("channel", post.channel)
    check_int64("id", post.event.id, at_least=0)


def check_change(change: MemberChange) -> None:
    """Refuse (`InvalidValue`) a change of a membership that a database can't take."""
    check_text("channel", change.channel)
    check_text("user", change.user)
    check_int64("epoch", change.epoch, at_least=0)
    check_int64("offset", change.offset, at_least=0)
