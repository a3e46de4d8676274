from tests.queues.conftest import databases

__all__ = ["databases"]
