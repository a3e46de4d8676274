"""The server: one process that hosts the systems over HTTP, with authentication, limits, health checks and metrics."""

from shardyard.server.app import running, serving

__all__ = ["running", "serving"]
