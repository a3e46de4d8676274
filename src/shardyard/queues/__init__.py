"""Work queues: topics with producers and consumer groups, delays, retries, dead letters, settings and alarms."""
