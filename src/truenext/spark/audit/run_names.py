"""Names of runs that are shown side by side. The folders of their tables have the same names."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

from truenext.errors import ConfigurationError
from truenext.spark.paths import Location, is_address


def run_names(folders: Sequence[Location]) -> list[str]:
    """Return for each folder the shortest end of its path that no other folder has. Addresses (s3a://...) are allowed.

    >>> run_names(["/runs/monday/data", "/runs/tuesday/data", "/copy"])
    ['monday/data', 'tuesday/data', 'copy']

    Raises: ConfigurationError if a folder is named twice
    """
    parts = [_parts(folder) for folder in folders]
    for number, each in enumerate(parts):
        if each in parts[:number]:
            raise ConfigurationError(f"{folders[number]} is named twice: name each history once")
    lengths = [1] * len(parts)
    while True:
        names = ["/".join(each[-length:]) for each, length in zip(parts, lengths, strict=True)]
        count = Counter(names)
        longer = [
            min(length + (count[name] > 1), len(each)) for name, each, length in zip(names, parts, lengths, strict=True)
        ]
        if longer == lengths:
            return names
        lengths = longer


def _parts(folder: Location) -> tuple[str, ...]:
    if is_address(folder):
        path = PurePosixPath("/", str(folder).partition("://")[2])
    else:
        path = PurePosixPath(Path(folder).resolve().as_posix())
    return path.parts[1:] or ("root",)
