"""The media types of bodies, and the limits that a server sets on every request."""

JSON = "application/json"
MSGPACK = "application/msgpack"
ARROW = "application/vnd.apache.arrow.stream"
MEDIA_TYPES = (JSON, MSGPACK, ARROW)
"""What records can be published in, and read by consumers."""

MAX_BODY_BYTES = 32 * 1024 * 1024
"""A larger body is refused before it is read."""
MAX_MESSAGE_BYTES = MAX_BODY_BYTES + 64 * 1024
"""The same for a message on a WebSocket connection: a body of that size fits in."""
MAX_DELAY_MS = 90 * 24 * 3_600_000
"""The longest delay of a record."""
MAX_WAIT_SECONDS = 30.0
"""The longest time for which an HTTP request can wait for records or changes."""
MAX_READ_SECONDS = 600.0
"""The same for a read on a WebSocket connection."""
