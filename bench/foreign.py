"""Brokers of other protocols, RabbitMQ and NATS.

They use only the programs of the system; configuration, data and ports are their own.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

from bench.brokers import Broker, BrokerError, free_port

_RABBIT_FOLDER = Path("/usr/lib/rabbitmq/bin")
"""Folder of the script that any user may start; Debian's script in the path is for root and the user rabbitmq only."""

_RABBIT_IS_READY = "Server startup complete"
_RABBIT_VERSION = re.compile(r"Starting RabbitMQ (\S+) on Erlang (\S+)")

_NATS_IS_READY = "Server is ready"
_NATS_PORT = re.compile(r"Listening for client connections on 127\.0\.0\.1:(\d+)")
_NATS_CONFIGURATION = """\
host: 127.0.0.1
port: -1
jetstream {{
  store_dir: "{store}"
{syncing}}}
"""
_NATS_SYNCING = "  sync_interval: always\n"


class Foreign(Broker):
    client: str
    """Package of its usual client in asyncio."""

    @property
    def version(self) -> str:
        """Version of the running broker."""
        raise NotImplementedError

    @property
    def promise(self) -> str:
        """Durability of a confirmed message."""
        raise NotImplementedError


class RabbitMQ(Foreign):
    """RabbitMQ as Debian ships it, without plugins, and with a node, a port and an epmd of its own."""

    name = "RabbitMQ"
    client = "aio-pika"

    def __init__(self, parent: Path | None = None) -> None:
        super().__init__(parent)
        self._names: subprocess.Popen[bytes] | None = None
        """Process of epmd, which tells nodes of Erlang the ports of others."""
        self._names_port = 0

    def prepare(self, folder: Path) -> list[str]:
        server = _rabbitmq_server()
        if server is None:
            raise BrokerError("RabbitMQ is not installed")
        (folder / "plugins").write_text("[].\n")
        (folder / "rabbitmq.conf").write_text("loopback_users.guest = true\n")
        (folder / "advanced.config").write_text("[].\n")
        (folder / "environment.conf").touch()
        self._environment = {
            "HOME": str(folder),  # where the cookie is
            "RUNNING_UNDER_SYSTEMD": "true",  # the script becomes the server, so that signals and figures are of that
            "RABBITMQ_CONF_ENV_FILE": str(folder / "environment.conf"),
            "RABBITMQ_CONFIG_FILE": str(folder / "rabbitmq.conf"),
            "RABBITMQ_ADVANCED_CONFIG_FILE": str(folder / "advanced.config"),
            "RABBITMQ_ENABLED_PLUGINS_FILE": str(folder / "plugins"),
            "RABBITMQ_NODENAME": f"bench-{os.getpid()}@localhost",
            "RABBITMQ_NODE_IP_ADDRESS": "127.0.0.1",
            "RABBITMQ_NODE_PORT": str(free_port()),
            "RABBITMQ_DIST_PORT": str(free_port()),
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": "-kernel inet_dist_use_interface {127,0,0,1}",
            "RABBITMQ_MNESIA_BASE": str(folder / "mnesia"),
            "RABBITMQ_LOG_BASE": str(folder / "log"),
            "RABBITMQ_LOGS": "-",  # what it prints is the log of every broker here
            "RABBITMQ_PID_FILE": str(folder / "pid"),
            "ERL_CRASH_DUMP": str(folder / "crash.dump"),
            "ERL_EPMD_ADDRESS": "127.0.0.1",
        }
        return [str(server)]

    def environment(self) -> dict[str, str]:
        inherited = {key: value for key, value in os.environ.items() if not key.startswith(("RABBITMQ_", "ERL_"))}
        # Otherwise the server would notify systemd.
        inherited.pop("NOTIFY_SOCKET", None)
        return inherited | self._environment | {"ERL_EPMD_PORT": str(self._names_port)}

    def start(self, patience: float) -> None:
        if self._names is None:
            # Otherwise the server would start an epmd that outlives it.
            self._names_port = free_port()
            self._names = subprocess.Popen(
                ["epmd", "-address", "127.0.0.1", "-port", str(self._names_port)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        super().start(patience)

    def stop(self) -> None:
        try:
            super().stop()
        finally:
            if self._names is not None:
                self._names.kill()
                self._names.wait()
                self._names = None

    def listening_port(self) -> int:
        return int(self._environment["RABBITMQ_NODE_PORT"]) if _RABBIT_IS_READY in self.log() else 0

    @property
    def version(self) -> str:
        found = _RABBIT_VERSION.search(self.log())
        return f"{found[1]}, Erlang {found[2]}" if found else "of unknown version"

    @property
    def promise(self) -> str:
        return "RabbitMQ confirms a persistent message in a durable queue when it is on the disk"


class Nats(Foreign):
    """NATS with JetStream, and its files synced as often as its version can."""

    name = "NATS"
    client = "nats-py"

    def prepare(self, folder: Path) -> list[str]:
        server = shutil.which("nats-server")
        if server is None:
            raise BrokerError("NATS is not installed")
        output = subprocess.run([server, "--version"], capture_output=True, text=True, check=False)
        self._version = (output.stdout + output.stderr).strip().rpartition("v")[2]
        file = folder / "nats.conf"
        self._syncs = True
        for syncing in (_NATS_SYNCING, ""):
            file.write_text(_NATS_CONFIGURATION.format(store=folder / "store", syncing=syncing))
            config_test = subprocess.run([server, "-c", str(file), "-t"], capture_output=True, text=True, check=False)
            if config_test.returncode == 0:
                break
            if "sync_interval" not in config_test.stderr:
                raise BrokerError(f"nats-server: {config_test.stderr.strip()}")
            self._syncs = False
        return [server, "-c", str(file)]

    def listening_port(self) -> int:
        found = _NATS_PORT.search(log := self.log())
        return int(found[1]) if found and _NATS_IS_READY in log else 0

    @property
    def version(self) -> str:
        return self._version

    @property
    def promise(self) -> str:
        if self._syncs:
            return "JetStream acknowledges a message that is forced to the disk (sync_interval: always)"
        return (
            "JetStream acknowledges a message before it is forced to the disk, for this version knows no sync_interval"
            " (2.10 does): if the machine stops, acknowledged messages are lost"
        )


def no_rabbitmq_reason() -> str | None:
    """Return the reason why RabbitMQ cannot be measured here, or None."""
    if _rabbitmq_server() is None or shutil.which("epmd") is None:
        return "rabbitmq-server is not installed (Debian: apt-get install rabbitmq-server)"
    return None


def no_nats_reason() -> str | None:
    """Return the reason why NATS cannot be measured here, or None."""
    if shutil.which("nats-server") is None:
        return "nats-server is not installed (Debian: apt-get install nats-server)"
    return None


def _rabbitmq_server() -> Path | None:
    if (server := _RABBIT_FOLDER / "rabbitmq-server").exists():
        return server
    found = shutil.which("rabbitmq-server")
    return Path(found) if found else None
