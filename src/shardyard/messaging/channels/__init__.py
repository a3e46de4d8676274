"""Channels on a messaging server: who of its users has joined them, who is online, and what is posted."""
