"""Brokers of the benchmarks: start a broker, and remove it without leaving anything.

Each broker is a process of its own with its data in a temporary folder and a free port on the loopback interface.
"""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import zipfile
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import IO, Self

import trustme

from bench import frames

MEMORY_FOLDER = Path("/dev/shm")
"""tmpfs on Linux, which writes nothing to a disk, so that fsync costs nothing."""
MEMORY_FOLDER_BYTES = 2 << 30
"""Space for up to 600 MiB of journal, and for checkpoint and history of one benchmark."""

_PATIENCE = 60.0
_PORT = re.compile(r"listening on (?:stomp|openwire)(?:\+ssl)?://127\.0\.0\.1:(\d+)")

# All other settings are ActiveMQ's defaults; in particular, KahaDB syncs each transaction.
_CONFIGURATION = """\
<beans xmlns="http://www.springframework.org/schema/beans"
       xmlns:xsi="http://www.w3.org/2001/XMLSchema-instance"
       xsi:schemaLocation="http://www.springframework.org/schema/beans
                           http://www.springframework.org/schema/beans/spring-beans-2.0.xsd
                           http://activemq.apache.org/schema/core
                           http://activemq.apache.org/schema/core/activemq-core.xsd">
  <broker xmlns="http://activemq.apache.org/schema/core" brokerName="bench" useJmx="false" useShutdownHook="true"
          dataDirectory="{base}/data">
    <destinationPolicy>
      <policyMap>
        <policyEntries>
          <policyEntry queue=">" prioritizedMessages="true"/>
        </policyEntries>
      </policyMap>
    </destinationPolicy>
    <persistenceAdapter>
      {store}
    </persistenceAdapter>
    <systemUsage>
      <systemUsage>
        <memoryUsage><memoryUsage limit="1 gb"/></memoryUsage>
        <storeUsage><storeUsage limit="8 gb"/></storeUsage>
        <tempUsage><tempUsage limit="4 gb"/></tempUsage>
      </systemUsage>
    </systemUsage>
    <transportConnectors>
      <transportConnector name="bench" uri="{scheme}://127.0.0.1:{port}"/>
    </transportConnectors>
  </broker>
  {beans}
</beans>
"""

_LOGGING = """\
log4j.rootLogger=WARN, console
log4j.appender.console=org.apache.log4j.ConsoleAppender
log4j.appender.console.layout=org.apache.log4j.PatternLayout
log4j.appender.console.layout.ConversionPattern=%d %-5p %c - %m%n
"""

# Packages that ActiveMQ's own start script opens.
_OPENED = (
    "java.base/java.security",
    "java.base/java.net",
    "java.base/java.lang",
    "java.base/java.util",
    "java.base/java.util.concurrent",
    "java.base/java.util.concurrent.atomic",
    "java.naming/javax.naming.spi",
    "java.rmi/sun.rmi.transport.tcp",
)


class BrokerError(RuntimeError):
    """A broker did not start or has died."""


class Broker:
    """Running broker, for the duration of a ``with`` block."""

    name = "broker"
    prefetch: int | None = 1000
    """Prefetch of its consumers; None leaves it to the broker."""
    authority: Path | None = None
    """File with the certificate that signs that of this broker; None if clients connect without TLS."""

    def __init__(self, parent: Path | None = None) -> None:
        self.port = 0
        self._parent = parent
        self._folder: Path | None = None
        self._command: list[str] = []
        self._log: IO[bytes] | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        try:
            prefix = f"bench-{self.name.lower().replace(' ', '-')}-"
            self._folder = Path(tempfile.mkdtemp(prefix=prefix, dir=self._parent))
            self._command = self.prepare(self._folder)
            self.start(_PATIENCE)
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.stop()

    def start(self, patience: float) -> None:
        """Start the broker with its folder as it is, and wait until it accepts connections.

        Raises: BrokerError if the process ends, or does not accept connections in `patience` seconds.
        """
        self._log = (self._require_folder() / "output.log").open("wb")
        self._process = subprocess.Popen(
            self._command,
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            env=self.environment(),
            start_new_session=True,  # Ctrl-C must reach the bench only, which then stops the broker in order
        )
        self._await_start(self._process, patience)

    def end(self, by: signal.Signals, patience: float) -> int:
        """Send a signal, and return the exit status; the folder stays.

        Raises: BrokerError if the process still runs after `patience` seconds.
        """
        process = self._process
        if process is None:
            raise BrokerError(f"{self.name} does not run")
        process.send_signal(by)
        try:
            status = process.wait(patience)
        except subprocess.TimeoutExpired as error:
            raise BrokerError(f"{self.name} still runs {patience:.0f} s after {by.name}") from error
        self._close_log()
        return status

    def prepare(self, folder: Path) -> list[str]:
        """Write the broker's files into ``folder`` and return its command line."""
        raise NotImplementedError

    def environment(self) -> dict[str, str]:
        return dict(os.environ)

    def listening_port(self) -> int:
        """Return the port once the broker accepts connections, 0 before."""
        raise NotImplementedError

    def log(self) -> str:
        """Return the output of the broker so far."""
        if self._folder is None:
            return ""
        return (self._folder / "output.log").read_text(errors="replace")

    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def anonymous_memory(self) -> int | None:
        """Return the process's current memory that is not of files (RssAnon), in KiB, without child processes."""
        found = re.search(r"RssAnon:\s+(\d+) kB", self._proc("status"))
        return int(found[1]) if found else None

    def peak_memory(self) -> int | None:
        """Return the peak of the process's resident memory, in KiB."""
        found = re.search(r"VmHWM:\s+(\d+) kB", self._proc("status"))
        return int(found[1]) if found else None

    def processor_seconds(self) -> float:
        """Return the processor time of the broker since its start."""
        fields = self._proc("stat").rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK") if fields else 0.0

    def stop(self) -> None:
        """End the process, cleanly if possible, and remove its files."""
        process = self._process
        try:
            if process is not None:
                process.terminate()
                with suppress(subprocess.TimeoutExpired):
                    process.wait(20)
        finally:
            if process is not None and process.poll() is None:
                process.kill()
                process.wait()
            self._close_log()
            if self._folder is not None:
                _end_exporter(self._folder / "data" / "history")
                shutil.rmtree(self._folder, ignore_errors=True)
                self._folder = None

    def _require_folder(self) -> Path:
        assert self._folder is not None, "before the with block, or behind it"
        return self._folder

    def _close_log(self) -> None:
        self._process = None
        if self._log is not None:
            self._log.close()

    def _await_start(self, process: subprocess.Popen[bytes], patience: float) -> None:
        deadline = time.monotonic() + patience
        while not (port := self.listening_port()):
            if process.poll() is not None:
                raise BrokerError(f"{self.name} ended with {process.returncode}:\n{self.log()[-3000:]}")
            if time.monotonic() > deadline:
                raise BrokerError(f"{self.name} did not start in {patience:.0f} s:\n{self.log()[-3000:]}")
            time.sleep(0.02)
        self.port = port

    def _proc(self, name: str) -> str:
        process = self._process
        if process is None:
            return ""
        try:
            return Path(f"/proc/{process.pid}/{name}").read_text()
        except OSError:
            return ""


class Truenext(Broker):
    """Broker of this repository, as installed for the interpreter that runs the benchmark."""

    name = "truenext"
    options: tuple[str, ...] = ()
    scheme = "stomp"

    def prepare(self, folder: Path) -> list[str]:
        return [
            *(sys.executable, "-m", "truenext", "serve"),
            *("--data", str(folder / "data"), "--listen", f"{self.scheme}://127.0.0.1:0"),
            *self.options,
        ]

    @property
    def data(self) -> Path:
        """Folder of messages and history."""
        return self._require_folder() / "data"

    def environment(self) -> dict[str, str]:
        return {**os.environ, "PYTHONUNBUFFERED": "1"}

    def listening_port(self) -> int:
        found = _PORT.search(self.log())
        return int(found[1]) if found else 0


class WithoutHistory(Truenext):
    """Truenext without a history, to measure the cost of the history."""

    name = "without history"
    options = ("--no-history",)


class WithoutUsers(Truenext):
    """Truenext beside one with users."""

    name = "without users"


class WithoutTls(Truenext):
    """Truenext beside one with TLS."""

    name = "without TLS"


class WithUsers(Truenext):
    """Truenext with a user for the clients, to measure the cost of checking what each frame may do."""

    def prepare(self, folder: Path) -> list[str]:
        users = folder / "users.toml"
        users.write_text(
            f'[user.{frames.USER}]\npassword_file = "password"\nsend = ["other.>", "bench.>"]\ntake = ["bench.>"]\n'
        )
        (folder / "password").write_text(frames.PASSWORD)
        for file in (users, folder / "password"):
            file.chmod(0o600)
        return [*super().prepare(folder), "--users", str(users)]


class WithTls(Truenext):
    """Truenext whose clients connect with TLS."""

    scheme = "stomp+ssl"

    def prepare(self, folder: Path) -> list[str]:
        authority = trustme.CA()
        self.authority = folder / "ca.pem"
        authority.cert_pem.write_to_path(self.authority)
        certificate = folder / "broker.pem"
        authority.issue_cert("localhost").private_key_and_cert_chain_pem.write_to_path(certificate)
        certificate.chmod(0o600)
        return [*super().prepare(folder), "--certificate", str(certificate)]


class WithAWindowOf1000(Truenext):
    """Truenext whose consumers request the size that automatic windows grow to."""

    name = "a window of 1000"


class WithoutSyncing(Truenext):
    """Truenext with its data in memory, where syncing is free, to measure the cost of syncing."""

    name = "without syncing"

    def __init__(self) -> None:
        super().__init__(MEMORY_FOLDER)


class ActiveMQ(Broker):
    """ActiveMQ of Debian's package ``activemq`` (or of ``ACTIVEMQ_HOME``) with a configuration of its own."""

    name = "ActiveMQ"
    scheme = "stomp"
    store = '<kahaDB directory="{base}/data/kahadb"/>'
    """Store, in the language of ActiveMQ's configuration; `{base}` is the broker's folder."""
    beans = ""
    """Objects that the store needs."""
    libraries: tuple[Path, ...] = ()

    def prepare(self, folder: Path) -> list[str]:
        java, home = _java(), activemq_home()
        if java is None or home is None:
            raise BrokerError("ActiveMQ is not installed")
        for part in ("conf", "data", "tmp"):
            (folder / part).mkdir()
        self._chosen_port = free_port()
        configuration = folder / "conf" / "activemq.xml"
        store = self.store.format(base=folder)
        configuration.write_text(
            _CONFIGURATION.format(
                base=folder, scheme=self.scheme, port=self._chosen_port, store=store, beans=self.beans
            )
        )
        (folder / "conf" / "log4j.properties").write_text(_LOGGING)
        paths = {"home": home, "base": folder, "conf": folder / "conf", "data": folder / "data"}
        return [
            java,
            "-Xmx2g",
            "-XX:+PerfDisableSharedMem",  # or the JVM leaves a file in the system's folder for temporary files
            "-Djava.awt.headless=true",
            f"-Djava.io.tmpdir={folder / 'tmp'}",
            *(part for package in _OPENED for part in ("--add-opens", f"{package}=ALL-UNNAMED")),
            *(f"-Dactivemq.{key}={path}" for key, path in paths.items()),
            f"-Dactivemq.classpath={os.pathsep.join(map(str, (folder / 'conf', *self.libraries)))}",
            *("-jar", str(home / "bin" / "activemq.jar"), "start", f"xbean:file:{configuration}"),
        ]

    def listening_port(self) -> int:
        with socket.socket() as probe:
            probe.settimeout(1)
            return 0 if probe.connect_ex(("127.0.0.1", self._chosen_port)) else self._chosen_port


def no_activemq_reason() -> str | None:
    """Return the reason why ActiveMQ cannot be measured here, or None."""
    if activemq_home() is None:
        return "ActiveMQ is not installed (Debian: apt-get install activemq; elsewhere set ACTIVEMQ_HOME)"
    if _java() is None:
        return "no java found"
    return None


def no_memory_folder_reason() -> str | None:
    """Return the reason why brokers with data in memory cannot be measured here, or None."""
    if not MEMORY_FOLDER.is_dir():
        return f"there is no folder in memory here ({MEMORY_FOLDER})"
    free = shutil.disk_usage(MEMORY_FOLDER).free
    if free < MEMORY_FOLDER_BYTES:
        needed = MEMORY_FOLDER_BYTES >> 20
        return f"{MEMORY_FOLDER} has {free >> 20:,} MiB free, the data of a broker may take {needed:,} MiB"
    return None


def activemq_home() -> Path | None:
    home = Path(os.environ.get("ACTIVEMQ_HOME", "/usr/share/activemq"))
    return home if (home / "bin" / "activemq.jar").exists() else None


def activemq_version() -> str:
    """Return the version in the jar file that starts ActiveMQ."""
    home = activemq_home()
    if home is None:
        return "none"
    with zipfile.ZipFile(home / "bin" / "activemq.jar") as jar:
        manifest = jar.read("META-INF/MANIFEST.MF").decode()
    found = re.search(r"^Implementation-Version:\s*(\S+)", manifest, re.MULTILINE)
    return found[1] if found else "of unknown version"


def java_version() -> str:
    java = _java()
    if java is None:
        return "none"
    output = subprocess.run(
        [java, "-XX:+PerfDisableSharedMem", "-version"], capture_output=True, text=True, check=False
    ).stderr
    found = re.search(r'version "([^"]+)"', output)
    return found[1] if found else "of unknown version"


def _java() -> str | None:
    configured = Path(os.environ.get("JAVA_HOME", "")) / "bin" / "java"
    return str(configured) if "JAVA_HOME" in os.environ and configured.exists() else shutil.which("java")


def _end_exporter(history: Path) -> None:
    """Kill the exporter of the history to Parquet, which a killed broker leaves behind."""
    for cmdline in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            if os.fsencode(history) in cmdline.read_bytes().split(b"\0"):
                os.kill(int(cmdline.parent.name), signal.SIGKILL)


_BELOW_EPHEMERAL_PORTS = range(20_000, 32_000)


def free_port() -> int:
    """Return a free port outside of the range from which the system chooses: the system could give one of those to
    another broker before it is used."""
    while True:
        port = random.SystemRandom().choice(_BELOW_EPHEMERAL_PORTS)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
