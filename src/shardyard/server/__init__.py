"""The server: one process that hosts the systems over HTTP, with authentication, limits, health checks and metrics."""

from typing import TYPE_CHECKING

from shardyard.model.extras import lazy_exports

if TYPE_CHECKING:
    from shardyard.server.app import running, serving

__all__ = ["running", "serving"]

__getattr__ = lazy_exports(__name__, {"running": "shardyard.server.app", "serving": "shardyard.server.app"})
