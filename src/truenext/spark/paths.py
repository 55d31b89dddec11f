"""Paths and addresses of files for Spark, which takes some characters in paths for patterns.

Source: Hadoop, `FileSystem.globStatus`
"""

import locale
import re
from pathlib import Path

from truenext.errors import ConfigurationError

Location = Path | str
"""Folder, or address with a scheme, such as hdfs:// and s3a://, that Spark opens."""


def is_address(location: Location) -> bool:
    return isinstance(location, str) and "://" in location


def below(location: Location, *names: str) -> Location:
    """Return the location of a file or folder below `location`."""
    if isinstance(location, str) and is_address(location):
        return "/".join((location.rstrip("/"), *names))
    return Path(location, *names)


def output_path(location: Location) -> str:
    """Return a location as an argument of `DataFrame.write`.

    Raises: ConfigurationError if Java cannot open the path
    """
    return str(location) if is_address(location) else path_to_write(Path(location).resolve())


_PATTERN_CHARACTERS = re.compile(r"[\\\[\]{}*?]")


def path_to_read(path: Path) -> str:
    """Return `path` as an argument of `spark.read`, which takes `[ ] { } * ? \\` for a pattern unless they are escaped.

    >>> path_to_read(Path("/data/run[1]"))
    '/data/run\\\\[1\\\\]'

    Raises: ConfigurationError if Hadoop or Java cannot open the path
    """
    pattern = _PATTERN_CHARACTERS.search(str(path))
    if pattern is not None and ":" in str(path):
        raise ConfigurationError(
            f"Spark cannot read {str(path)!r}: Hadoop cannot open a path that has {pattern[0]!r} and ':'; rename the "
            "folder or file"
        )
    return escape_pattern(path_to_write(path))


def escape_pattern(path: str) -> str:
    """Return a path or address with `\\` before each of `[ ] { } * ? \\`."""
    return _PATTERN_CHARACTERS.sub(r"\\\g<0>", path)


def path_to_write(path: Path) -> str:
    """Return `path` as an argument of `DataFrame.write`, which does not read patterns.

    Raises: ConfigurationError if Java cannot open the path
    """
    text = str(path)
    encoding = locale.getencoding()
    try:
        # Java encodes names of files as the locale says, also where Python uses UTF-8.
        text.encode(encoding)
    except UnicodeEncodeError as error:
        wrong = text[error.start]
        cause = (
            "a byte that is not UTF-8: rename the folder or file"
            if "\ud800" <= wrong <= "\udfff"
            else f"which the encoding of the locale, {encoding}, does not have: set LC_ALL=C.UTF-8"
        )
        raise ConfigurationError(f"Spark cannot open {text!r}: it has {wrong!r}, {cause}") from error
    return text
