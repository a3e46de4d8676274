"""What a history promises, computed anew from all entries for each question. Engines are compared with it."""

from collections.abc import Iterable, Sequence

from shardyard.messaging.history import ChatList, Page, PlacedEntry
from shardyard.model import Partition
from shardyard.wire.inbox import InboxEntry, Mark, MarkKind
from shardyard.wire.messaging import Chat, Message

INBOX_0 = Partition("inbox", 0)


def message(id_: int, sender: str, recipient: str, text: str = "hello", *, copy: bool = False) -> InboxEntry:
    return InboxEntry(id_, sender, recipient, "phone", id_ * 2, 1_700_000_000_000 + id_, text, copy)


def mark(id_: int, sender: str, recipient: str, kind: MarkKind, upto: int, *, copy: bool = False) -> InboxEntry:
    return InboxEntry(id_, sender, recipient, "phone", id_ * 2, 1_700_000_000_000 + id_, Mark(kind, upto), copy)


def placed(*entries: InboxEntry, epoch: int = 1, first: int = 0) -> list[PlacedEntry]:
    """The entries, one after the other in a partition."""
    return [PlacedEntry(INBOX_0, epoch, offset, entry) for offset, entry in enumerate(entries, first)]


class HistoryModel:
    def __init__(self) -> None:
        self._stored: dict[tuple[int, bool], PlacedEntry] = {}

    def store(self, entries: Iterable[PlacedEntry]) -> None:
        for each in entries:
            self._stored.setdefault((each.entry.id, each.entry.copy), each)

    def page(self, user: str, peer: str, before: int | None, limit: int) -> Page:
        wanted = [
            m for m in self._messages() if {m.sender, m.recipient} == {user, peer} and (before is None or m.id < before)
        ]
        newest = sorted(wanted, key=lambda m: m.id, reverse=True)
        return Page([_as_frame(m) for m in newest[:limit]], len(newest) > limit)

    def chats(self, user: str, before: int | None, limit: int) -> ChatList:
        peers = {
            m.recipient if m.sender == user else m.sender for m in self._messages() if user in (m.sender, m.recipient)
        }
        newest = sorted((self._chat(user, peer) for peer in peers), key=lambda chat: int(chat.last.id), reverse=True)
        wanted = [chat for chat in newest if before is None or int(chat.last.id) < before]
        return ChatList(wanted[:limit], len(wanted) > limit)

    def addressed_to(self, user: str, epoch: int, first: int, end: int, limit: int) -> Sequence[PlacedEntry]:
        wanted = [
            each
            for each in self._stored.values()
            if user == (each.entry.sender if each.entry.copy else each.entry.recipient)
            and each.epoch == epoch
            and first <= each.offset < end
        ]
        return sorted(wanted, key=lambda each: each.offset)[:limit]

    def sent_by(self, user: str, after: int, limit: int) -> Sequence[PlacedEntry]:
        wanted = [each for each in self._originals() if each.entry.sender == user and each.entry.id > after]
        return sorted(wanted, key=lambda each: each.entry.id)[:limit]

    def _chat(self, user: str, peer: str) -> Chat:
        seen = self._mark("seen", user, peer)
        unread = [
            m
            for m in self._messages()
            if (m.sender, m.recipient) == (peer, user) and user != peer and (seen is None or m.id > int(seen))
        ]
        return Chat(
            peer,
            self.page(user, peer, None, 1).messages[0],
            len(unread),
            seen,
            self._mark("delivered", peer, user),
            self._mark("seen", peer, user),
        )

    def _mark(self, kind: MarkKind, sender: str, recipient: str) -> str | None:
        found = [
            each.entry.content.upto
            for each in self._originals()
            if isinstance(each.entry.content, Mark)
            and each.entry.content.kind == kind
            and (each.entry.sender, each.entry.recipient) == (sender, recipient)
        ]
        return str(max(found)) if found else None

    def _originals(self) -> list[PlacedEntry]:
        return [each for each in self._stored.values() if not each.entry.copy]

    def _messages(self) -> list[InboxEntry]:
        return [each.entry for each in self._originals() if isinstance(each.entry.content, str)]


def _as_frame(entry: InboxEntry) -> Message:
    assert isinstance(entry.content, str)
    return Message(str(entry.id), entry.sender, entry.recipient, entry.content, entry.at)
