"""The HTTP broker: stateless, any number of them on one log and registry."""
