"""The client of `socketio_app.py`: Socket.IO 5 over Engine.IO 4, on WebSocket from the start."""

import json
import random

from bench.messengers.messenger import Messenger
from bench.messengers.python_servers import serve_socketio
from bench.messengers.websocket import WebSocketClient

OPEN, PING, PONG = b"0", b"2", "3"
CONNECT, EVENT, ACK = b"40", b"42", b"43"


class SocketIOClient(WebSocketClient):
    def _url(self) -> str:
        return random.choice(self.addresses)

    def handle(self, message: bytes) -> None:
        if message.startswith(EVENT):
            _, frame = json.loads(message[2:])
            self._receive(frame["text"])
        elif message.startswith(ACK):
            self._acknowledge(int(message[2 : message.index(b"[")]))
        elif message == PING:
            self._send_text(PONG)
        elif message.startswith(CONNECT):
            self._opened()
        elif message.startswith(OPEN):
            self._send_text(CONNECT.decode() + json.dumps({"user": self.user}))

    def _transmit(self, number: int, recipient: str, text: str) -> None:
        self._send_text(f"42{number}" + json.dumps(["message", {"to": recipient, "text": text}]))


SOCKETIO = Messenger("Socket.IO", SocketIOClient, serve_socketio)
