"""Who may make which call. Every route but the health checks depends on one of these."""

from typing import Annotated

from fastapi import Depends, Request

from shardyard.model import WrongToken
from shardyard.queues.broker import Broker
from shardyard.queues.settings import TopicSettings


def broker_of(request: Request) -> Broker:
    """The broker, without authentication: for the health checks."""
    broker: Broker = request.app.state.broker
    return broker


async def authorise(request: Request) -> Broker:
    """The broker, if the caller sent its token. `WrongToken` otherwise."""
    broker = broker_of(request)
    _check(broker, request)
    return broker


async def authorise_publish(request: Request) -> Broker:
    """The broker, if the caller may publish to the topic of the path. `WrongToken` otherwise."""
    broker = broker_of(request)
    topic: str = request.path_params["topic"]
    _check(broker, request, topic, await broker.topic_settings(topic))
    return broker


def _check(broker: Broker, request: Request, topic: str | None = None, settings: TopicSettings | None = None) -> None:
    """The one rule: a topic with a token of its own takes that one from publishers, everything else the broker's."""
    token = token_of(request)
    if settings is not None and settings.token_hash is not None:
        if not settings.admits(token):
            raise WrongToken(f"topic {topic!r}")
    elif not broker.admits(token):
        raise WrongToken("this broker")


def token_of(request: Request) -> str | None:
    """The token that the caller sent, if any."""
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    return token if scheme.lower() == "bearer" else None


Authorised = Annotated[Broker, Depends(authorise)]
"""The broker, as a parameter of every route that requires the broker's token."""
AuthorisedPublisher = Annotated[Broker, Depends(authorise_publish)]
"""The same for a route that publishes to the topic of its path."""
