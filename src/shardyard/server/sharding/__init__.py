"""Sharded queues over HTTP and WebSocket."""
