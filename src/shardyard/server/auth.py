"""Who may make which call, whichever carrier brings it. Every route but the health checks depends on one of these."""

from collections.abc import Mapping
from typing import Annotated

from fastapi import Depends, Request

from shardyard.model import WrongToken
from shardyard.queues.broker import Broker


def check_token(broker: Broker, token: str | None) -> None:
    """`WrongToken` unless it is the token of the broker, or the broker has none."""
    if not broker.admits(token):
        raise WrongToken("this broker")


async def check_publisher(broker: Broker, token: str | None, topic: str) -> None:
    """`WrongToken` unless the caller may publish to the topic: one with a token of its own takes that one from
    publishers, all others take the broker's."""
    settings = await broker.settings.topic(topic)
    if settings.token_hash is None:
        check_token(broker, token)
    elif not settings.admits(token):
        raise WrongToken(f"topic {topic!r}")


async def check_connection(broker: Broker, token: str | None) -> None:
    """`WrongToken` unless there is something that the caller may do on a connection: it has the token of the broker, or
    that of a topic. Each call is checked by itself, too."""
    if not broker.admits(token) and not await broker.admits_to_a_topic(token):
        raise WrongToken("this broker")


def broker_of(request: Request) -> Broker:
    """The broker, without authentication: for the health checks."""
    broker: Broker = request.app.state.broker
    return broker


async def authorise(request: Request) -> Broker:
    """The broker, if the caller sent its token. `WrongToken` otherwise."""
    broker = broker_of(request)
    check_token(broker, token_of(request.headers))
    return broker


async def authorise_publish(request: Request) -> Broker:
    """The broker, if the caller may publish to the topic of the path. `WrongToken` otherwise."""
    broker = broker_of(request)
    await check_publisher(broker, token_of(request.headers), request.path_params["topic"])
    return broker


def token_of(headers: Mapping[str, str]) -> str | None:
    """The token in the headers of a request, if any."""
    scheme, _, token = headers.get("authorization", "").partition(" ")
    return token if scheme.lower() == "bearer" else None


Authorised = Annotated[Broker, Depends(authorise)]
"""The broker, as a parameter of every route that requires the broker's token."""
AuthorisedPublisher = Annotated[Broker, Depends(authorise_publish)]
"""The same for a route that publishes to the topic of its path."""
