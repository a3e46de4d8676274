"""The bridge to RabbitMQ, for teams that keep it: the API of `ShardingClient` on RabbitMQ's own sharded exchanges, and
moving their messages to Shardyard. It needs the extra `rabbitmq`."""

import logging

from shardyard.model.extras import require

require("rabbitmq", "shardyard.client.rabbitmq")
logging.getLogger("aiormq").addHandler(logging.NullHandler())  # what it logs is raised as well

from shardyard.client.rabbitmq.client import RabbitMQClient  # noqa: E402 it says what is missing first
from shardyard.client.rabbitmq.moving import move_exchange  # noqa: E402 likewise

__all__ = ["RabbitMQClient", "move_exchange"]
