"""Packages of npm whose files the console serves: `python -m tools.web_assets`.

    web-assets.json  --download from npm's registry, check integrity-->  src/truenext/console/static/vendor/

The lock names each package with its version, the integrity of its archive, and the files that are copied, each with
its SHA-256. The files are committed: neither an installation nor a test needs npm or a network. A test compares them
with the lock. To take a newer version: change it in the lock, run `python -m tools.web_assets --lock`, and read the
difference.
"""

import argparse
import base64
import hashlib
import io
import json
import sys
import tarfile
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).parents[1]
LOCK = _ROOT / "tools" / "web-assets.json"
FOLDER = _ROOT / "src" / "truenext" / "console" / "static" / "vendor"
REGISTRY = "https://registry.npmjs.org"


class AssetError(Exception):
    """A package or a file is not what the lock says."""


@dataclass(frozen=True)
class Package:
    """One package of the lock."""

    name: str
    version: str
    integrity: str
    """`sha512-` and the digest of the archive in Base64, as npm writes it."""

    sources: Mapping[str, str]
    """Names of files in the vendor folder, each with its path in the package."""

    digests: Mapping[str, str]
    """Names of files in the vendor folder, each with its SHA-256 in hexadecimal digits."""

    @property
    def url(self) -> str:
        """Address of the archive in npm's registry."""
        return f"{REGISTRY}/{self.name}/-/{self.name.rpartition('/')[2]}-{self.version}.tgz"


def read_lock(text: str) -> list[Package]:
    """Return the packages of a lock."""
    return [
        Package(
            each["name"],
            each["version"],
            each["integrity"],
            {name: file["source"] for name, file in each["files"].items()},
            {name: file["sha256"] for name, file in each["files"].items()},
        )
        for each in json.loads(text)
    ]


def write_lock(packages: list[Package]) -> str:
    """Return the text of a lock with these packages."""
    found: list[dict[str, Any]] = [
        {
            "name": each.name,
            "version": each.version,
            "integrity": each.integrity,
            "files": {
                name: {"source": source, "sha256": each.digests.get(name, "")} for name, source in each.sources.items()
            },
        }
        for each in packages
    ]
    return json.dumps(found, indent=2) + "\n"


def integrity_of(archive: bytes) -> str:
    """Return the integrity of an archive, as npm writes it."""
    return "sha512-" + base64.b64encode(hashlib.sha512(archive).digest()).decode()


def unpack(package: Package, archive: bytes) -> dict[str, bytes]:
    """Return the files that the lock names, from the archive of their package.

    Raises: AssetError if the archive is another, or a file is missing
    """
    if (found := integrity_of(archive)) != package.integrity:
        raise AssetError(f"{package.url} has the integrity {found}, the lock {package.integrity}")
    with tarfile.open(fileobj=io.BytesIO(archive), mode="r:gz") as opened:
        return {name: _file_in(opened, f"package/{source}", package) for name, source in package.sources.items()}


def faults(packages: list[Package], folder: Path) -> Iterator[str]:
    """Return a sentence for each file of the folder that differs from the lock, is missing, or is not named there."""
    digests = {name: digest for each in packages for name, digest in each.digests.items()}
    found = {each.name: each for each in folder.iterdir()} if folder.is_dir() else {}
    for name in sorted({*digests, *found}):
        if name not in found:
            yield f"{name} is missing: python -m tools.web_assets"
        elif name not in digests:
            yield f"{name} is not in the lock"
        elif hashlib.sha256(found[name].read_bytes()).hexdigest() != digests[name]:
            yield f"{name} differs from the lock"


def _file_in(opened: tarfile.TarFile, path: str, package: Package) -> bytes:
    try:
        file = opened.extractfile(path)
    except KeyError:
        file = None
    if file is None:
        raise AssetError(f"{package.name} {package.version} has no file {path}")
    return file.read()


def _download(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=60) as response:
        content: bytes = response.read()
    return content


def main() -> None:
    """Write the files of the lock; with --lock the lock anew, from what npm has of its versions."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lock", action="store_true", help="write integrity and digests of the lock's versions anew")
    arguments = parser.parse_args()
    packages = []
    FOLDER.mkdir(parents=True, exist_ok=True)
    for package in read_lock(LOCK.read_text()):
        archive = _download(package.url)
        if arguments.lock:
            package = replace(package, integrity=integrity_of(archive))
        files = unpack(package, archive)
        if arguments.lock:
            package = replace(package, digests={name: hashlib.sha256(each).hexdigest() for name, each in files.items()})
        for name, content in files.items():
            (FOLDER / name).write_bytes(content)
        packages.append(package)
    if arguments.lock:
        LOCK.write_text(write_lock(packages))
    if found := list(faults(packages, FOLDER)):
        sys.exit("\n".join(found))


if __name__ == "__main__":
    main()
