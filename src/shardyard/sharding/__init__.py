"""Sharded queues: exchanges whose messages are partitioned over shards, as RabbitMQ's sharding plugin does it."""
