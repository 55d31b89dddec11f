"""Java programs of the unmodified ActiveMQ client, compiled when a test needs them."""

import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

_FOLDER = Path("/usr/share/java")
CLIENT = (
    "activemq-client",
    "geronimo-jms_1.1_spec",
    "geronimo-j2ee-management-1.1-spec",
    "slf4j-api",
    "slf4j-simple",
    "hawtbuf",
)
_SPRING_PARTS = ("aop", "beans", "context", "core", "expression", "jms", "messaging", "transaction")
SPRING = (*CLIENT, "commons-logging", *(f"spring3-{part}" for part in _SPRING_PARTS))
_SOURCES = Path(__file__).parent
_PATIENCE_SECONDS = 120


def missing_reason(jars: Sequence[str] = CLIENT) -> str | None:
    """Return why programs that need these libraries cannot run here; None if they can."""
    if shutil.which("javac") is None or shutil.which("java") is None:
        return "javac is not installed"
    missing = [str(jar) for jar in _paths(jars) if not jar.exists()]
    return f"a library of Java is not installed: {missing[0]} is missing" if missing else None


def _paths(jars: Sequence[str]) -> list[Path]:
    return [_FOLDER / f"{name}.jar" for name in jars]


def class_path(jars: Sequence[str] = CLIENT) -> str:
    """Return the class path of programs that need these libraries."""
    return ":".join(map(str, _paths(jars)))


class Programs:
    """Compiled programs of one class."""

    def __init__(self, folder: Path, source: str = "JmsCases.java", jars: Sequence[str] = CLIENT) -> None:
        self._class = Path(source).stem
        self._path = f"{class_path(jars)}:{folder}"
        subprocess.run(
            [
                *("javac", "-nowarn", "-cp", self._path, "-sourcepath", str(_SOURCES)),
                "-d",
                str(folder),
                _SOURCES / source,
            ],
            check=True,
            timeout=_PATIENCE_SECONDS,
        )

    def run(
        self,
        case: str,
        url: str,
        *arguments: str,
        java: Sequence[str] = (),
        password: str | None = None,
        patience_seconds: float = _PATIENCE_SECONDS,
    ) -> list[str]:
        """Run a case with options of Java, and return the lines that it has printed, without the last one, which says
        that all of it has run.

        The program gets `password`, which no command line may show, in its environment.
        """
        result = subprocess.run(
            self._command(case, url, arguments, java),
            capture_output=True,
            check=False,
            timeout=patience_seconds,
            env=_environment(password),
        )
        lines = result.stdout.decode().splitlines()
        assert lines and lines[-1] == "done", f"{lines}\n{result.stderr.decode()[:6000]}"
        return lines[:-1]

    def start(self, case: str, url: str, *arguments: str, password: str | None = None) -> "subprocess.Popen[str]":
        """Start a case. What it prints can be read from its `stdout`."""
        return subprocess.Popen(
            self._command(case, url, arguments, ()),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=_environment(password),
        )

    def _command(self, case: str, url: str, arguments: Sequence[str], java: Sequence[str]) -> list[str]:
        options = ["-Xshare:auto", "-XX:TieredStopAtLevel=1", "-Dorg.slf4j.simpleLogger.defaultLogLevel=warn"]
        options += ["-Dfile.encoding=UTF-8", "-Dstdout.encoding=UTF-8", *java]
        return ["java", *options, "-cp", self._path, self._class, case, url, *arguments]


def _environment(password: str | None) -> dict[str, str] | None:
    return None if password is None else {**os.environ, "JMS_PASSWORD": password}
