"""A minimal XMPP client over TCP: stream management (XEP-0198), message carbons (XEP-0280), archive (XEP-0313).

A client whose stream can't be resumed reads what it missed from the archive, from some time before it lost its
connection, and drops what it has got before, by sender and message id.
"""

import asyncio
import base64
import time
from collections import deque
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import cast
from xml.etree.ElementTree import Element, TreeBuilder
from xml.parsers import expat
from xml.sax.saxutils import escape

from bench.messengers.messenger import Client

HOST = "localhost"
PASSWORD = "bench"
"""Of all users."""
KNOWN_IDS = 2_000
ARCHIVE_PAGE = 200
OVERLAP_SECONDS = 10
"""What was archived so long before the connection was lost may have been missed."""

CLIENT, STREAM = "jabber:client", "http://etherx.jabber.org/streams"
SASL, BIND = "urn:ietf:params:xml:ns:xmpp-sasl", "urn:ietf:params:xml:ns:xmpp-bind"
MANAGEMENT, CARBONS, FORWARD = "urn:xmpp:sm:3", "urn:xmpp:carbons:2", "urn:xmpp:forward:0"
ARCHIVE, RESULT_SET = "urn:xmpp:mam:2", "http://jabber.org/protocol/rsm"

HEADER = f"<stream:stream xmlns='{CLIENT}' xmlns:stream='{STREAM}' to='{HOST}' version='1.0'>"


def name(space: str, tag: str) -> str:
    """An element's name as the parser gives it."""
    return f"{space} {tag}"


WRAPPERS = (name(CARBONS, "sent"), name(CARBONS, "received"), name(ARCHIVE, "result"))
"""What a message may be wrapped in, before the element `forwarded`."""


class StanzaParser:
    """Calls `on_stanza` with each child of the stream's root, as it is complete."""

    def __init__(self, on_stanza: Callable[[Element], None]) -> None:
        self._parser = expat.ParserCreate(namespace_separator=" ")
        self._parser.buffer_text = True
        self._parser.StartElementHandler = self._start
        self._parser.EndElementHandler = self._end
        self._parser.CharacterDataHandler = self._data
        self._on_stanza = on_stanza
        self._depth = 0
        self._builder = TreeBuilder()

    def feed(self, data: bytes) -> None:
        self._parser.Parse(data)

    def _start(self, tag: str, attributes: dict[str, str]) -> None:
        if self._depth > 0:
            self._builder.start(tag, attributes)
        self._depth += 1

    def _data(self, data: str) -> None:
        if self._depth > 1:
            self._builder.data(data)

    def _end(self, tag: str) -> None:
        self._depth -= 1
        if self._depth > 0:
            self._builder.end(tag)
        if self._depth == 1:
            stanza, self._builder = self._builder.close(), TreeBuilder()
            self._on_stanza(stanza)


class Connection(asyncio.Protocol):
    """A TCP connection: stanzas that nobody waits for go to the client."""

    def __init__(self, on_stanza: Callable[[Element], None], on_lost: Callable[[], None]) -> None:
        self._on_stanza = on_stanza
        self._on_lost = on_lost
        self._expected: asyncio.Future[Element] | None = None
        self._tags: Sequence[str] = ()
        self._transport: asyncio.Transport | None = None
        self._parser = StanzaParser(self._stanza)
        self.is_detached = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        if not self.is_detached:
            self._parser.feed(data)

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        if self._expected is not None and not self._expected.done():
            self._expected.set_exception(ConnectionError(str(error or "the connection was closed")))
        if not self.is_detached:
            self._on_lost()

    def send(self, text: str) -> None:
        if self._transport is not None:
            self._transport.write(text.encode())

    async def call(self, text: str, *tags: str) -> Element:
        """Send something, and wait for the next stanza with one of these names."""
        if self._transport is None:
            raise ConnectionError("the connection was closed")
        self._expected, self._tags = asyncio.get_running_loop().create_future(), tags
        self.send(text)
        return await self._expected

    async def open_stream(self) -> None:
        self._parser = StanzaParser(self._stanza)
        await self.call(HEADER, name(STREAM, "features"))

    def close(self) -> None:
        self.is_detached = True
        if self._transport is not None:
            self._transport.abort()

    def _stanza(self, stanza: Element) -> None:
        if self._expected is not None and not self._expected.done() and stanza.tag in self._tags:
            self._expected.set_result(stanza)
        else:
            self._on_stanza(stanza)


class XmppClient(Client):
    def __init__(self, addresses: Sequence[str], *arguments: object) -> None:
        super().__init__(addresses, *arguments)  # type: ignore[arg-type]
        self._connection: Connection | None = None
        self._resumption = ""
        """The id by which the stream can be resumed."""
        self._handled = 0
        """Stanzas received on the stream."""
        self._sent: deque[int | None] = deque()
        """The numbers of the texts that the server has not acknowledged; None for other stanzas."""
        self._acknowledged = 0
        """Stanzas that the server has acknowledged on the stream."""
        self._missing_since: float | None = None
        """Something may have been missed since then, in seconds since 1970."""
        self._is_behind = False
        """What was missed must be read from the archive."""
        self._known: dict[str, None] = {}

    async def _open(self) -> None:
        host, port = self.addresses[0].split(":")
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(lambda: Connection(self._take, self._lose), host, int(port))
        self._connection = connection
        await connection.open_stream()
        credentials = base64.b64encode(f"\0{self.user}\0{PASSWORD}".encode()).decode()
        authenticate = f"<auth xmlns='{SASL}' mechanism='PLAIN'>{credentials}</auth>"
        answer = await connection.call(authenticate, name(SASL, "success"), name(SASL, "failure"))
        if answer.tag == name(SASL, "failure"):
            raise ConnectionError(f"{self.user} was not authenticated")
        await connection.open_stream()
        if not (self._resumption and await self._resume(connection)):
            await self._begin(connection)
        if self._is_behind and self._missing_since is not None:
            await self._catch_up(connection, self._missing_since)
        self._missing_since, self._is_behind = None, False

    async def _resume(self, connection: Connection) -> bool:
        """Whether the server still knows the stream. What it did not get is sent again by the caller."""
        request = f"<resume xmlns='{MANAGEMENT}' h='{self._handled}' previd='{self._resumption}'/>"
        answer = await connection.call(request, name(MANAGEMENT, "resumed"), name(MANAGEMENT, "failed"))
        if answer.tag == name(MANAGEMENT, "failed"):
            return False
        self._note_acknowledged(int(answer.get("h", "0")))
        self._sent.clear()
        return True

    async def _begin(self, connection: Connection) -> None:
        """A new session."""
        iq = name(CLIENT, "iq")
        self._is_behind = self._missing_since is not None
        await connection.call(
            f"<iq type='set' id='b'><bind xmlns='{BIND}'><resource>{self.device}</resource></bind></iq>", iq
        )
        enabled = await connection.call(
            f"<enable xmlns='{MANAGEMENT}' resume='true'/>", name(MANAGEMENT, "enabled"), name(MANAGEMENT, "failed")
        )
        self._resumption = enabled.get("id", "")
        self._handled = self._acknowledged = 0
        self._sent.clear()
        await self._ask(connection, f"<iq type='set' id='c'><enable xmlns='{CARBONS}'/></iq>")
        self._sent.append(None)
        connection.send("<presence/>")

    async def _ask(self, connection: Connection, text: str) -> Element:
        self._sent.append(None)
        answer = await connection.call(text, name(CLIENT, "iq"))
        self._handled += 1
        return answer

    async def _catch_up(self, connection: Connection, since: float) -> None:
        """Read the archive from that time on; its results arrive as messages.

        It is not read from the last known id: ids are given before messages are delivered, and not in the same order.
        """
        start = datetime.fromtimestamp(since, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        form = (
            f"<x xmlns='jabber:x:data' type='submit'><field var='FORM_TYPE'><value>{ARCHIVE}</value></field>"
            f"<field var='start'><value>{start}</value></field></x>"
        )
        after, is_complete = "", False
        while not is_complete:
            page = f"<set xmlns='{RESULT_SET}'><max>{ARCHIVE_PAGE}</max>{after}</set>"
            query = f"<iq type='set' id='m'><query xmlns='{ARCHIVE}'>{form}{page}</query></iq>"
            answer = await self._ask(connection, query)
            end = find(answer, name(ARCHIVE, "fin"))
            if end is None:
                raise ConnectionError(f"the archive was not read: {answer.get('type')}")
            last = find(end, name(RESULT_SET, "set"), name(RESULT_SET, "last"))
            after = "" if last is None else f"<after>{last.text}</after>"
            is_complete = end.get("complete") == "true" or last is None

    def _lose(self) -> None:
        if self._missing_since is None:
            self._missing_since = time.time() - OVERLAP_SECONDS
        super()._lose()

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _transmit(self, number: int, recipient: str, text: str) -> None:
        if self._connection is None:
            return
        self._sent.append(number)
        message_id = f"{self.device}-{number}"
        self._connection.send(
            f"<message to='{recipient}@{HOST}' type='chat' id='{message_id}'><body>{escape(text)}</body></message>"
            f"<r xmlns='{MANAGEMENT}'/>"
        )

    def _take(self, stanza: Element) -> None:
        if stanza.tag == name(CLIENT, "message"):
            self._handled += 1
            self._take_message(stanza)
        elif stanza.tag == name(MANAGEMENT, "r") and self._connection is not None:
            self._connection.send(f"<a xmlns='{MANAGEMENT}' h='{self._handled}'/>")
        elif stanza.tag == name(MANAGEMENT, "a"):
            self._note_acknowledged(int(stanza.get("h", "0")))
        elif stanza.tag in {name(CLIENT, "presence"), name(CLIENT, "iq")}:
            self._handled += 1
        elif stanza.tag == name(STREAM, "error"):
            self.refusals.append(", ".join(child.tag for child in stanza))

    def _note_acknowledged(self, handled: int) -> None:
        while self._acknowledged < handled and self._sent:
            self._acknowledged += 1
            if (number := self._sent.popleft()) is not None:
                self._acknowledge(number)

    def _take_message(self, stanza: Element) -> None:
        """A message for the user, a carbon, or a result from the archive."""
        message = stanza
        for wrapper in WRAPPERS:
            wrapped = find(stanza, wrapper, name(FORWARD, "forwarded"), name(CLIENT, "message"))
            message = message if wrapped is None else wrapped
        body = find(message, name(CLIENT, "body"))
        if stanza.get("type") == "error":
            self.refusals.append("a message was returned as an error")
            return
        if body is None or body.text is None:
            return
        text = body.text
        sender, _, device = message.get("from", "").partition("/")
        if self._knows(f"{sender}/{device} {message.get('id')}"):
            return
        if sender != f"{self.user}@{HOST}":
            self._receive(text)
        elif device != self.device:
            self._receive_copy(text)

    def _knows(self, key: str) -> bool:
        if key in self._known:
            return True
        self._known[key] = None
        if len(self._known) > KNOWN_IDS:
            del self._known[next(iter(self._known))]
        return False


def find(element: Element, *path: str) -> Element | None:
    """The first child with the first name, its first child with the second name, and so on."""
    found: Element | None = element
    for tag in path:
        found = None if found is None else next((child for child in found if child.tag == tag), None)
    return found
