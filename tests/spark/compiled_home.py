"""Folder of Spark for tests, in which its Python processes find compiled modules.

Spark starts Python with `python/lib/pyspark.zip` first on the path, an archive without compiled modules. So each
process of a query compiles hundreds of modules anew, and a query has several such processes. Here the archives are
folders with the installed packages.
"""

import tempfile
from contextlib import suppress
from pathlib import Path

import pyspark

SPARK = Path(pyspark.__file__).parent


def spark_home(cache: Path) -> Path:
    """Return such a folder in the folder `cache`, made by the first call."""
    home = cache / f"spark-{pyspark.__version__}"
    if not home.exists():
        cache.mkdir(exist_ok=True)
        made = Path(tempfile.mkdtemp(dir=cache))
        _link_all(made)
        # Another process may have made it meanwhile.
        with suppress(OSError):
            made.rename(home)
    return home


def _link_all(home: Path) -> None:
    for each in SPARK.iterdir():
        if each.name != "python":
            (home / each.name).symlink_to(each)
    for archive in (SPARK / "python" / "lib").glob("*.zip"):
        folder = home / "python" / "lib" / archive.name
        folder.mkdir(parents=True)
        # Such as py4j-0.10.9.9-src.zip: both packages are installed side by side.
        package = archive.stem.partition("-")[0]
        (folder / package).symlink_to(SPARK.with_name(package))
