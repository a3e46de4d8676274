"""Messaging servers: users, their clients, and the server that owns their partition."""
