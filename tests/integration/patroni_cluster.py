"""PostgreSQL on three machines with Patroni and etcd, as Debian has them. A machine is an address of loopback."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import psycopg

from tests.integration.broker_process import PATIENCE_SECONDS

POSTGRESQL = Path("/usr/lib/postgresql/15/bin")
NEEDED = [
    *(Path("/usr/bin") / name for name in ("etcd", "patroni", "patronictl")),
    Path("/usr/lib/python3/dist-packages/etcd"),
    POSTGRESQL / "postgres",
]
# PostgreSQL refuses to run as root.
USER = "postgres" if os.geteuid() == 0 else None
PORT, API_PORT, ETCD_PORT, PEER_PORT = 5432, 8008, 2379, 2380

_QUICK = {"ttl": 10, "loop_wait": 1, "retry_timeout": 4}
"""Settings of Patroni by which a test need not wait for half a minute."""

_SETTINGS = {"shared_buffers": "16MB", "autovacuum": "off", "jit": "off"}


def missing_files() -> str:
    return ", ".join(str(each) for each in NEEDED if not each.exists())


class PatroniCluster:
    """One primary and two standbys, one of which is synchronous."""

    def __init__(self, folder: Path) -> None:
        """`folder` exists, in a place that any user can reach."""
        self._etcd_address, *addresses = _new_addresses(4)
        self._folder = folder
        if USER is not None:
            shutil.chown(folder, USER)
        self._etcd = self._start_etcd()
        self.machines = [
            Machine(folder, name, address, self._configuration(name, address))
            for name, address in zip(("one", "two", "three"), addresses, strict=True)
        ]
        self.folder = ",".join(addresses)
        """Addresses of all servers, as a URL names them."""
        self.start()

    def _start_etcd(self) -> subprocess.Popen[bytes]:
        clients, peers = (f"http://{self._etcd_address}:{port}" for port in (ETCD_PORT, PEER_PORT))
        options = {
            "data-dir": str(self._folder / "etcd"),
            "listen-client-urls": clients,
            "advertise-client-urls": clients,
            "listen-peer-urls": peers,
            "initial-advertise-peer-urls": peers,
            "initial-cluster": f"default={peers}",
        }
        return _started(["/usr/bin/etcd", *(f"--{name}={value}" for name, value in options.items())], self._folder)

    def _configuration(self, name: str, address: str) -> dict[str, Any]:
        """Return Patroni's configuration of a machine."""
        api, database = f"{address}:{API_PORT}", f"{address}:{PORT}"
        # As in Debian's template: a former primary becomes a standby by itself.
        rejoining = {"use_pg_rewind": True, "remove_data_directory_on_diverged_timelines": True}
        rejoining["remove_data_directory_on_rewind_failure"] = True
        return {
            "scope": "messages",
            "name": name,
            "restapi": {"listen": api, "connect_address": api},
            "etcd3": {"host": f"{self._etcd_address}:{ETCD_PORT}"},
            "bootstrap": {
                "dcs": {**_QUICK, "postgresql": {**rejoining, "parameters": _SETTINGS}},
                "initdb": [{"encoding": "UTF8"}, {"locale": "C"}, {"auth": "trust"}, "no-sync"],
            },
            "postgresql": {
                "listen": database,
                "connect_address": database,
                "data_dir": str(self._folder / name),
                "bin_dir": str(POSTGRESQL),
                "pgpass": str(self._folder / f"{name}.pgpass"),
                "authentication": {"superuser": {"username": "postgres"}, "replication": {"username": "replicator"}},
                "parameters": {"unix_socket_directories": ""},
                "pg_hba": ["host all all 127.0.0.0/8 trust", "host replication all 127.0.0.0/8 trust"],
            },
        }

    @property
    def log(self) -> str:
        """Last lines of each machine."""
        logs = [(self._folder / f"{each.name}.log").read_text().splitlines() for each in self.machines]
        return "\n".join(line for lines in logs for line in lines[-40:])

    def connect(self, database: str = "postgres") -> psycopg.Connection[tuple[object, ...]]:
        """Connect to the primary."""
        return psycopg.connect(
            host=self.folder,
            user="postgres",
            dbname=database,
            autocommit=True,
            target_session_attrs="read-write",
            connect_timeout=2,
        )

    def await_primary(self) -> Machine:
        """Wait for a machine whose PostgreSQL is the primary, and whose Patroni runs and says so."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while True:
            for machine in self.machines:
                if machine.is_primary:
                    return machine
            assert time.monotonic() < deadline, f"no primary, log:\n{self.log}"
            time.sleep(0.05)

    def start(self) -> None:
        """Start what was killed."""
        for machine in self.machines:
            machine.start()

    def restore(self) -> None:
        """Start what was killed, and wait until both standbys follow, and one is synchronous to Patroni."""
        self.start()
        deadline = time.monotonic() + 2 * PATIENCE_SECONDS
        while not self._is_whole():
            assert time.monotonic() < deadline, f"a standby does not follow, log:\n{self.log}"
            time.sleep(0.1)

    def _is_whole(self) -> bool:
        roles = [each["role"] for each in self.await_primary().members() if each["state"] in {"running", "streaming"}]
        if sorted(roles) != ["leader", "replica", "sync_standby"]:
            return False
        with suppress(psycopg.OperationalError), self.connect() as connection:
            streaming = connection.execute("SELECT FROM pg_stat_replication WHERE state = 'streaming'").fetchall()
            return len(streaming) == 2
        return False

    def edit_configuration(self, settings: str) -> None:
        """Add to Patroni's dynamic configuration, as an administrator does in an editor. `settings` are YAML."""
        file = self._folder / "settings.yml"
        file.write_text(settings)
        self.await_primary()
        self._control("edit-config", "--apply", str(file))

    def switch_over(self) -> None:
        """Exchange the primary, as an administrator does. All that the command asks for has a default."""
        self._control("switchover")

    def _control(self, command: str, *options: str) -> None:
        """Run a command of patronictl."""
        file = str(self.machines[0].configuration)
        run = _started(["/usr/bin/patronictl", "-c", file, command, "messages", "--force", *options], self._folder)
        assert run.wait(PATIENCE_SECONDS) == 0, (self._folder / "patronictl.log").read_text()

    def clean_up(self) -> None:
        for machine in self.machines:
            machine.kill()
        self._etcd.kill()
        self._etcd.wait()


class Machine:
    """Patroni and the PostgreSQL that it has started."""

    def __init__(self, folder: Path, name: str, address: str, configuration: Mapping[str, Any]) -> None:
        self.name = name
        self.address = address
        self.configuration = folder / f"{name}.yml"
        # JSON is YAML.
        self.configuration.write_text(json.dumps(configuration))
        self._data = folder / name
        self._folder = folder
        self._patroni: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start Patroni if it does not run, as systemd does. It starts PostgreSQL."""
        if self._patroni is None:
            self._patroni = _started(["/usr/bin/patroni", str(self.configuration)], self._folder, self.name)

    def kill_patroni(self) -> None:
        """Kill Patroni by kill -9. Its PostgreSQL goes on."""
        if self._patroni is not None:
            self._patroni.kill()
            self._patroni.wait()
            self._patroni = None

    def kill_postgres(self, *, with_sessions: bool) -> None:
        """Kill PostgreSQL, if it runs, by kill -9: its first process only, or all. Sessions may outlive the first one
        by a statement."""
        # A former server's file stays, and its number may be that of any process now.
        with suppress(FileNotFoundError, ProcessLookupError):
            first = int((self._data / "postmaster.pid").read_text().split()[0])
            if str(self._data).encode() in Path(f"/proc/{first}/cmdline").read_bytes():
                # The first that dies would otherwise start the others anew.
                for process in [first, *(_children(first) if with_sessions else [])]:
                    with suppress(ProcessLookupError):
                        os.kill(process, signal.SIGKILL)

    def kill(self) -> None:
        """Kill all that runs here, as a power cut does."""
        self.kill_patroni()
        self.kill_postgres(with_sessions=True)

    @property
    def is_primary(self) -> bool:
        """Whether Patroni runs here, has the leader's key, and its PostgreSQL is the primary."""
        with suppress(OSError), urlopen(f"http://{self.address}:{API_PORT}/primary", timeout=2):
            return self._patroni is not None
        return False

    def members(self) -> Sequence[Mapping[str, Any]]:
        """Return name, role and state of each machine, as Patroni says here."""
        with suppress(OSError), urlopen(f"http://{self.address}:{API_PORT}/cluster", timeout=2) as answer:
            members: list[Mapping[str, Any]] = json.load(answer)["members"]
            return members
        return []


def _started(command: Sequence[str], folder: Path, log: str = "") -> subprocess.Popen[bytes]:
    """Start a program of Debian, which dies with this process."""
    log = log or Path(command[0]).name
    as_user = [] if USER is None else [f"--reuid={USER}", f"--regid={USER}", "--init-groups"]
    with (folder / f"{log}.log").open("ab") as output:
        return subprocess.Popen(
            ["/usr/bin/setpriv", *as_user, "--pdeathsig=KILL", *command],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            cwd=folder,
            env={"PATH": "/usr/bin:/bin", "HOME": str(folder), "LANG": "C.UTF-8"},
        )


def _children(process: int) -> list[int]:
    return [int(each) for each in Path(f"/proc/{process}/task/{process}/children").read_text().split()]


def _new_addresses(count: int) -> list[str]:
    """Return random addresses of loopback, at which ports need not differ from the usual ones."""
    chance = random.SystemRandom()
    return [f"127.{chance.randrange(1, 255)}.{chance.randrange(256)}.{chance.randrange(1, 255)}" for _ in range(count)]


@contextmanager
def own_cluster(settings: str) -> Iterator[PatroniCluster]:
    """Yield a cluster with `settings` in its dynamic configuration, in YAML."""
    with tempfile.TemporaryDirectory(prefix="truenext-patroni-", ignore_cleanup_errors=True) as folder:
        Path(folder).chmod(0o755)
        cluster = PatroniCluster(Path(folder))
        try:
            cluster.edit_configuration(settings)
            cluster.restore()
            yield cluster
        finally:
            cluster.clean_up()
