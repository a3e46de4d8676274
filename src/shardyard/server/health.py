"""Health checks and metrics. Only the health checks need no token, so that load balancers can call them."""

from fastapi import APIRouter, Request, Response

from shardyard.model import RetryLater
from shardyard.runtime import metrics
from shardyard.server.auth import Authorised, broker_of
from shardyard.server.drain import drain_of
from shardyard.server.http import respond
from shardyard.server.sharding.measuring import measure_queues
from shardyard.server.sharding.service import hosted_of
from shardyard.wire import responses

router = APIRouter(tags=["health"])


@router.get("/healthz")
async def check_alive() -> Response:
    """Whether the process responds."""
    return respond(responses.Liveness())


@router.get("/readyz")
async def check_ready(request: Request) -> Response:
    """Whether the broker takes requests: log and registry respond, and it is not about to stop."""
    broker = broker_of(request)
    if drain_of(request).started:
        raise RetryLater("this broker is about to stop: use another one")
    await broker.log.topics()
    await broker.node.transactions.read(lambda tx: tx.now)
    return respond(responses.Readiness(ready=True, leads=broker.node.rebalancer.leads))


@router.get("/metrics")
async def export_metrics(request: Request, broker: Authorised) -> Response:
    """Metrics of this process, in the text format of Prometheus."""
    metrics.LEADER.set(int(broker.node.rebalancer.leads))
    await measure_queues(hosted_of(request).running)
    return Response(metrics.render(), headers={"Content-Type": metrics.CONTENT_TYPE})
