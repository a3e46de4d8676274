"""How much of a server callers can take: connections, memory, and time without progress."""

import resource
from dataclasses import dataclass, replace
from typing import Self

RESERVED_FILES = 128
"""Files that a process can open beside its connections: of the log, the registry and the interpreter."""


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """The limits of one server. A caller that exceeds one is refused or cut; others do not notice."""

    connections: int = 5_000
    """Open at a time. Further ones are answered with 503 and closed."""
    body_bytes: int = 128 * 1024 * 1024
    """Of all bodies larger than `small_body_bytes` together, from the start of reading them to the response. A request
    whose body would exceed it is answered with 503. Records take more memory while they are decoded and stored."""
    small_body_bytes: int = 64 * 1024
    """A body up to this size is always read, so that heartbeats, commits and single records get through."""
    head_bytes: int = 64 * 1024
    """Of the request line and the headers of one request."""
    pipelined: int = 64
    """Requests that wait on one connection for an earlier one."""
    head_seconds: float = 10.0
    """From connecting, or from the first byte of a later request, to the end of its headers. A caller that got its
    response before its body was read has as long to send the rest, which is discarded."""
    stalled_seconds: float = 10.0
    """Without any progress of a body."""
    unread_seconds: float = 60.0
    """Without any progress of a response that the caller does not read. The kernel takes data in steps of a megabyte or
    so, and slow callers need some time for one."""

    idle_seconds: float = 60.0
    """Without anything from a client on a WebSocket connection, not even a ping. The client sends one every 10 s."""
    calls: int = 10_000
    """In progress on a WebSocket connection, with the reads that wait for records. Further ones are refused."""
    call_bytes: int = 16 * 1024 * 1024
    """Of messages in progress on a WebSocket connection. No more of them are read while they exceed it."""

    def within_open_files(self) -> Self:
        """The same with as many connections as the process may open files (`ulimit -n`)."""
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft == resource.RLIM_INFINITY:
            return self
        return replace(self, connections=min(self.connections, max(soft - RESERVED_FILES, 1)))


DEFAULT_LIMITS = ServerLimits()


def raise_open_files(connections: int) -> None:
    """Let this process open files for as many connections, as far as its hard limit allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = connections + RESERVED_FILES
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
