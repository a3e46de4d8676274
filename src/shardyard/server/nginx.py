"""The configuration of an Nginx in front of several brokers."""

import re
from collections.abc import Sequence
from string import Template

from shardyard.model import InvalidValue
from shardyard.wire.media import MAX_BODY_BYTES, MAX_WAIT_SECONDS

SLACK_SECONDS = 15
"""For a response, beyond the longest wait of a long poll."""
_HOST = r"(?:[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])"
_ADDRESS = re.compile(rf"({_HOST}):([0-9]{{1,5}})")
_LISTEN = re.compile(rf"(?:({_HOST}|\*):)?([0-9]{{1,5}})")

_CONFIG = Template("""\
# Nginx in front of the brokers of Shardyard, written by `shardyard nginx-config`. Check it and start it, as any user:
#
#     nginx -p FOLDER -c nginx.conf -e error.log -t
#     nginx -p FOLDER -c nginx.conf -e error.log
#
# All other files are in FOLDER too. If root starts it, its workers run as another user, who needs access to FOLDER.

worker_processes auto;
worker_rlimit_nofile 32768;
pid nginx.pid;
error_log error.log warn;

events {
    worker_connections 16384; # two for each connection of a client
}

http {
    access_log off; # or: access_log access.log;
    server_tokens off;

    client_body_temp_path client_body_temp;
    proxy_temp_path proxy_temp;
    fastcgi_temp_path fastcgi_temp;
    uwsgi_temp_path uwsgi_temp;
    scgi_temp_path scgi_temp;

    map $$http_upgrade $$connection_header {
        default upgrade; # a WebSocket connection
        ""      "";      # any other request keeps the connection to the broker
    }

    upstream brokers {
        zone brokers 256k; # all workers share what they know about the brokers
        least_conn;
        # A broker that fails 3 times within 2 s gets no requests for the next 2 s.
$servers
        keepalive 128;
        keepalive_timeout 4s; # less than the 5 s after which a broker closes an idle connection
    }

    server {
        listen $listen;

        client_max_body_size $body; # the limit of a broker
        client_body_buffer_size 1m; # a batch of usual size is not written to disk
        error_page 413 @too_large;

        location / {
            proxy_pass http://brokers;
            proxy_http_version 1.1;
            proxy_set_header Upgrade $$http_upgrade;
            proxy_set_header Connection $$connection_header;
            proxy_set_header Host $$host;
            proxy_set_header X-Forwarded-For $$remote_addr;
            proxy_set_header X-Forwarded-Proto $$scheme;

            proxy_connect_timeout 2s;
            proxy_send_timeout ${read}s;
            proxy_read_timeout ${read}s; # a long poll waits for up to ${wait} s; a connection is pinged every 10 s
            proxy_buffering off; # responses are passed on at once

            # All requests can be repeated, also POST. A publish is stored once if it has a producer and a sequence, as
            # those of the client have; others may be stored twice when a broker dies.
            proxy_next_upstream error timeout invalid_header non_idempotent;
        }

        location @too_large {
            default_type application/json;
            return 413 '{"error": {"code": "too_large", "message": "body in bytes is beyond the limit of $body"}}';
        }
    }
}
""")


def nginx_config(brokers: Sequence[str], listen: str) -> str:
    """A complete nginx.conf. `brokers`: such as 10.0.0.5:7400; `listen`: a port, or a host and a port."""
    if isinstance(brokers, str) or not brokers:
        raise InvalidValue("brokers", brokers, "at least one address such as 127.0.0.1:7400")
    if len(set(brokers)) < len(brokers):
        raise InvalidValue("brokers", list(brokers), "each of them once")
    for address in brokers:
        _check("brokers", address, _ADDRESS, "addresses such as 127.0.0.1:7400")
    _check("listen", listen, _LISTEN, "a port such as 7480, or a host and a port")
    return _CONFIG.substitute(
        servers="\n".join(f"        server {address} max_fails=3 fail_timeout=2s;" for address in brokers),
        listen=listen if ":" in listen else f"127.0.0.1:{listen}",
        body=MAX_BODY_BYTES,
        wait=f"{MAX_WAIT_SECONDS:g}",
        read=round(MAX_WAIT_SECONDS) + SLACK_SECONDS,
    )


def _check(name: str, text: str, form: re.Pattern[str], expected: str) -> None:
    found = form.fullmatch(text)
    if found is None or not 0 < int(found[2]) < 65536:
        raise InvalidValue(name, text, expected)
