"""The client of `starlette_app.py`, which reconnects to any of its servers."""

import json
import random

from bench.messengers.messenger import Messenger
from bench.messengers.python_servers import serve_starlette
from bench.messengers.websocket import WebSocketClient


class StarletteClient(WebSocketClient):
    def _url(self) -> str:
        return f"{random.choice(self.addresses)}?user={self.user}"

    def handle(self, message: bytes) -> None:
        frame = json.loads(message)
        if "text" in frame:
            self._receive(frame["text"])
        elif "sent" in frame:
            self._acknowledge(frame["sent"])
        else:
            self._opened()

    def _transmit(self, number: int, recipient: str, text: str) -> None:
        self._send_text(json.dumps({"number": number, "to": recipient, "text": text}))


STARLETTE = Messenger("Starlette + Redis", StarletteClient, serve_starlette)
