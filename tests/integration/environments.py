"""Python environments that contain only what a test names, and its requirements.

An environment consists of links to the distributions of the tests' own environment: nothing is downloaded or built.
"""

import re
import shlex
import sys
from collections.abc import Iterable, Iterator
from importlib import metadata
from pathlib import Path
from venv import EnvBuilder

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]


def make_environment(folder: Path, requirements: Iterable[str]) -> str:
    """Return the interpreter of a new environment in `folder`."""
    EnvBuilder(symlinks=True).create(folder)
    packages = folder / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    for distribution in _find_distributions(requirements):
        for name in {file.parts[0] for file in distribution.files or ()} - {"..", "__pycache__"}:
            (packages / name).symlink_to(str(distribution.locate_file(name)))
    return str(folder / "bin" / "python")


def requirements_of_page(page: str) -> list[str]:
    """Return the requirements that the commands of a page install."""
    text = (ROOT / page).read_text()
    assert "\nmake setup\n" in text
    words = shlex.split(" ".join(re.findall(r"^\.venv/bin/pip install (.+)$", text, re.MULTILINE)))
    return ["truenext", *(word.replace(".[", "truenext[") for word in words if word != "-e")]


def _find_distributions(requirements: Iterable[str]) -> Iterator[metadata.Distribution]:
    required = [Requirement(each) for each in requirements]
    extras: dict[str, set[str]] = {}
    for requirement in required:
        distribution = metadata.distribution(requirement.name)
        name = distribution.metadata["Name"]
        is_new = name not in extras
        of_distribution = extras.setdefault(name, set())
        if is_new:
            yield distribution
        elif requirement.extras <= of_distribution:
            continue
        of_distribution |= requirement.extras
        # The list grows while it is walked.
        required += [
            needed
            for needed in map(Requirement, distribution.requires or ())
            if needed.marker is None or any(needed.marker.evaluate({"extra": each}) for each in ("", *of_distribution))
        ]
