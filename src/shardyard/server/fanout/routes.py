"""The HTTP routes of coordinators and fan-out workers."""

from typing import Annotated

from fastapi import APIRouter, Depends, Request, Response

from shardyard.model import RetryLater
from shardyard.runtime import metrics
from shardyard.server.auth import token_of
from shardyard.server.drain import drain_of
from shardyard.server.fanout.service import FanoutService
from shardyard.server.http import read_body, request_body, respond
from shardyard.server.messaging.admin import check_admin
from shardyard.wire import responses
from shardyard.wire.peers import TYPING_PATH, ChannelTyping, TypingRouted

router = APIRouter(tags=["fanout"])
worker_router = APIRouter(tags=["fanout"])
"""Routes that only workers have."""


def service_of(request: Request) -> FanoutService:
    service: FanoutService = request.app.state.service
    return service


Service = Annotated[FanoutService, Depends(service_of)]


@router.get("/healthz")
async def check_alive() -> Response:
    """Whether the process responds."""
    return respond(responses.Liveness())


@router.get("/readyz")
async def check_ready(request: Request, service: Service) -> Response:
    """Whether the process does what the mode calls for, which may be to stand by."""
    if drain_of(request).started or not service.process.is_ready:
        raise RetryLater("this process is about to stop, or waits for its group")
    return respond(responses.Liveness())


@router.get("/metrics", dependencies=[Depends(check_admin)])
async def export_metrics() -> Response:
    """Metrics of this process, in the text format of Prometheus."""
    return Response(metrics.render(), headers={"Content-Type": metrics.CONTENT_TYPE})


@router.get("/v1/status", dependencies=[Depends(check_admin)])
async def show_status(service: Service) -> Response:
    """What the process does, which partitions it owns, and how large its routing table is."""
    return respond(service.status())


@worker_router.post(TYPING_PATH, openapi_extra=request_body(ChannelTyping))
async def route_typing(request: Request, service: Service) -> Response:
    """Tell the messaging servers of a channel's online members that somebody is typing. For messaging servers only."""
    service.tokens.check_peer(token_of(request.headers))
    notice = await read_body(request, ChannelTyping)
    return respond(TypingRouted(await service.route_typing(notice)))
