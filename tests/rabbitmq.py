"""A real RabbitMQ server on free loopback ports, for tests and benchmarks."""

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.servers import free_port, install, run_server

_SCRIPTS = Path("/usr/lib/rabbitmq/bin")
"""RabbitMQ's own scripts. Debian's commands are not used: they switch to a user that cannot write to our folder."""


def find_rabbitmq() -> Path | None:
    """The path of RabbitMQ's own start script, installed if need be. None if that fails, which is printed."""
    command = install("rabbitmq-server")
    return command and _SCRIPTS / "rabbitmq-server"


@dataclass(frozen=True, slots=True)
class RabbitMQ:
    """A server that runs."""

    port: int
    node: str
    """Its name in Erlang's cluster, which is a part of the names of shards."""
    settings: Mapping[str, str]

    @property
    def url(self) -> str:
        return f"amqp://guest:guest@127.0.0.1:{self.port}/"

    def control(self, *arguments: str) -> str:
        """Run `rabbitmqctl`, and return what it prints."""
        command = [str(_SCRIPTS / "rabbitmqctl"), "--node", self.node, "--quiet", *arguments]
        environment = {**os.environ, **self.settings}
        return subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True).stdout

    def set_policy(self, name: str, pattern: str, definition: str) -> None:
        """Set a policy for exchanges, as the documentation of the plugin does."""
        self.control("set_policy", name, pattern, definition, "--apply-to", "exchanges")


@contextlib.contextmanager
def rabbitmq_server(server: Path, folder: Path, plugins: Sequence[str] = ()) -> Iterator[RabbitMQ]:
    """Run RabbitMQ with default settings, and Erlang's port mapper (epmd) for it."""
    port, epmd_port = free_port(), free_port()
    enabled = folder / "plugins"
    enabled.write_text(f"[{','.join(plugins)}].\n")
    settings = {
        "HOME": str(folder),  # Erlang keeps its cookie there
        "ERL_EPMD_PORT": str(epmd_port),
        "ERL_EPMD_ADDRESS": "127.0.0.1",
        "RABBITMQ_CONF_ENV_FILE": os.devnull,
        "RABBITMQ_CONFIG_FILE": str(folder / "none"),
        "RABBITMQ_ENABLED_PLUGINS_FILE": str(enabled),
        "RABBITMQ_LOG_BASE": str(folder / "log"),
        "RABBITMQ_MNESIA_BASE": str(folder / "data"),
        "RABBITMQ_NODENAME": f"rabbit-{port}@localhost",
        "RABBITMQ_NODE_IP_ADDRESS": "127.0.0.1",
        "RABBITMQ_NODE_PORT": str(port),
        "RABBITMQ_DIST_PORT": str(free_port()),
        "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": "-kernel inet_dist_use_interface {127,0,0,1}",
    }
    epmd = shutil.which("epmd") or "epmd"
    with run_server([epmd], epmd_port, folder, settings), run_server([str(server)], port, folder, settings):
        yield RabbitMQ(port, settings["RABBITMQ_NODENAME"], settings)
