"""Java programs of the unmodified ActiveMQ client, compiled when a test needs them."""

import shutil
import subprocess
from pathlib import Path

_JARS = [
    Path("/usr/share/java") / f"{name}.jar"
    for name in (
        "activemq-client",
        "geronimo-jms_1.1_spec",
        "geronimo-j2ee-management-1.1-spec",
        "slf4j-api",
        "slf4j-simple",
        "hawtbuf",
    )
]
_SOURCES = Path(__file__).parent
_PATIENCE_SECONDS = 120


def missing_reason() -> str | None:
    """Return why the programs cannot run here; None if they can."""
    if shutil.which("javac") is None or shutil.which("java") is None:
        return "javac is not installed"
    missing = [str(jar) for jar in _JARS if not jar.exists()]
    return f"ActiveMQ's client is not installed: {missing[0]} is missing" if missing else None


class Programs:
    """Compiled programs."""

    def __init__(self, folder: Path) -> None:
        self._path = ":".join([*map(str, _JARS), str(folder)])
        sources = sorted(map(str, _SOURCES.glob("*.java")))
        subprocess.run(
            ["javac", "-nowarn", "-cp", self._path, "-d", str(folder), *sources], check=True, timeout=_PATIENCE_SECONDS
        )

    def run(self, case: str, url: str, *arguments: str) -> list[str]:
        """Run a case of JmsCases, and return the lines that it has printed, without the last one, which says that all
        of it has run."""
        result = subprocess.run(self._command(case, url, *arguments), capture_output=True, timeout=_PATIENCE_SECONDS)
        lines = result.stdout.decode().splitlines()
        assert lines and lines[-1] == "done", f"{lines}\n{result.stderr.decode()[:6000]}"
        return lines[:-1]

    def start(self, case: str, url: str, *arguments: str) -> "subprocess.Popen[str]":
        """Start a case of JmsCases. What it prints can be read from its `stdout`."""
        return subprocess.Popen(
            self._command(case, url, *arguments), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    def _command(self, case: str, url: str, *arguments: str) -> list[str]:
        options = ["-Xshare:auto", "-XX:TieredStopAtLevel=1", "-Dorg.slf4j.simpleLogger.defaultLogLevel=warn"]
        return [
            "java",
            "-Dfile.encoding=UTF-8",
            "-Dstdout.encoding=UTF-8",
            *options,
            "-cp",
            self._path,
            "JmsCases",
            case,
            url,
            *arguments,
        ]
