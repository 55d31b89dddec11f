"""Facts about the machine of a benchmark, and the time in which its disk syncs."""

from __future__ import annotations

import os
import platform
import statistics
import sysconfig
import tempfile
import time
from pathlib import Path

from bench import brokers
from truenext.wire.stomp.speedups import CODEC_LANGUAGE

_BLOCK = b"x" * 4096
_ROUNDS = 300


def facts(folder: Path) -> list[tuple[str, str]]:
    """Return the facts that a reader needs to judge the figures; ``folder`` holds the brokers' data."""
    return [
        ("processor", f"{_processor()}, {os.cpu_count()} cores"),
        ("memory", f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.0f} GiB"),
        # Processes that ran before the bench began lower all figures, and not those of both brokers alike.
        ("load average at the start", f"{os.getloadavg()[0]:.2f}"),
        ("system", f"{platform.system()} {platform.release()}"),
        ("python", f"{platform.python_implementation()} {platform.python_version()}, {_describe_build()}"),
        ("codec", f"in {CODEC_LANGUAGE}"),
        ("write and fsync of 4 KiB", _describe_times(fsync_times(folder))),
    ]


def activemq() -> tuple[str, str]:
    version = "not installed" if brokers.no_activemq_reason() else brokers.activemq_version()
    return "activemq", f"{version}, java {brokers.java_version()}"


def fsync_times(folder: Path, rounds: int = _ROUNDS) -> list[float]:
    """Return the seconds of appending a block to a file and syncing it, sorted."""
    times: list[float] = []
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        for _ in range(rounds):
            started = time.perf_counter()
            file.write(_BLOCK)
            os.fsync(file.fileno())
            times.append(time.perf_counter() - started)
    return sorted(times)


def _describe_times(times: list[float]) -> str:
    slow = times[len(times) * 99 // 100]
    return f"median {statistics.median(times) * 1e6:.0f} us, 99 % below {slow * 1e6:.0f} us"


def _describe_build() -> str:
    """Describe build options that make the interpreter faster by a tenth to a fifth."""
    config_args = str(sysconfig.get_config_var("CONFIG_ARGS") or "")
    flags = str(sysconfig.get_config_var("PY_CFLAGS") or "") + str(sysconfig.get_config_var("PY_CFLAGS_NODIST") or "")
    has = {
        "profile-guided optimisation": "--enable-optimizations" in config_args or "-fprofile-use" in flags,
        "link-time optimisation": "--with-lto" in config_args or "-flto" in flags,
        "a shared library": "--enable-shared" in config_args,
    }
    level = next((flag for flag in reversed(flags.split()) if flag.startswith("-O")), "-O?")
    return f"built {level}, " + ", ".join(f"{'with' if yes else 'without'} {option}" for option, yes in has.items())


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
