"""A messaging server over the network: WebSocket connections of users' clients, and a few HTTP routes."""
