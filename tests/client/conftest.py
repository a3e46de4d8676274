from tests.queues.conftest import databases

__all__ = ["databases"]  # a fixture that every test uses by itself
