"""What a Python team would build first: WebSockets with Starlette, and Redis pub/sub between the processes.

One connection to Redis receives for all users of the process. A text is acknowledged when Redis has it; who is not
connected at that moment does not get it.
"""

import asyncio
import contextlib
import json
import os
from collections import defaultdict
from collections.abc import AsyncIterator
from typing import Any

from redis import asyncio as aioredis
from starlette.applications import Starlette
from starlette.routing import WebSocketRoute
from starlette.websockets import WebSocket

redis = aioredis.Redis.from_url(os.environ.get("REDIS_URL", "redis://127.0.0.1"))
subscriptions: Any = redis.pubsub(ignore_subscribe_messages=True)
connected: defaultdict[str, set[WebSocket]] = defaultdict(set)


async def deliver() -> None:
    """Hand what arrives from Redis to the clients of its user."""
    async for message in subscriptions.listen():
        for websocket in list(connected[message["channel"].decode()]):
            with contextlib.suppress(Exception):  # it has just disconnected
                await websocket.send_text(message["data"].decode())


@contextlib.asynccontextmanager
async def lifespan(_: Starlette) -> AsyncIterator[None]:
    await subscriptions.subscribe("-")  # so that there is something to listen to
    delivering = asyncio.create_task(deliver())
    yield
    delivering.cancel()


async def messaging(websocket: WebSocket) -> None:
    user = websocket.query_params["user"]
    await websocket.accept()
    await subscriptions.subscribe(user)
    connected[user].add(websocket)
    await websocket.send_json({"ready": True})
    try:
        async for text in websocket.iter_text():
            call = json.loads(text)
            await redis.publish(call["to"], json.dumps({"from": user, "text": call["text"]}))
            await websocket.send_json({"sent": call["number"]})
    finally:
        connected[user].discard(websocket)
        if not connected[user]:
            del connected[user]
            await subscriptions.unsubscribe(user)


app = Starlette(routes=[WebSocketRoute("/messaging", messaging)], lifespan=lifespan)
