"""The same with python-socketio: a room for each user, and its Redis manager between the processes."""

import os
from typing import Any

import socketio

server = socketio.AsyncServer(
    async_mode="asgi", client_manager=socketio.AsyncRedisManager(os.environ.get("REDIS_URL", "redis://127.0.0.1"))
)
app = socketio.ASGIApp(server)


async def connect(client: str, _: dict[str, Any], credentials: dict[str, str]) -> None:
    await server.save_session(client, {"user": credentials["user"]})
    await server.enter_room(client, credentials["user"])


async def message(client: str, call: dict[str, str]) -> bool:
    """What it returns is the acknowledgement."""
    session = await server.get_session(client)
    await server.emit("message", {"from": session["user"], "text": call["text"]}, room=call["to"])
    return True


server.on("connect", connect)
server.on("message", message)
