"""Paths of the HTTP API."""

from urllib.parse import quote


def path(*names: object) -> str:
    """A path of the API. Names can have any characters."""
    return "/v1/" + "/".join(quote(str(name), safe="") for name in names)


def member_path(group: str, member: str) -> str:
    return path("groups", group, "members", member)


def partition_path(group: str, partition: str) -> str:
    """The path of a partition, such as `orders/3`, as a group sees it."""
    topic, _, index = partition.rpartition("/")
    return path("groups", group, "partitions", topic, index)
