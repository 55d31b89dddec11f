"""Packages of truenext in dist/, an sdist and a wheel: `make dist`.

    files of git  --copy-->  tree  --build-->  truenext-N.tar.gz  --unpack, build-->  truenext-N-TAGS.whl

Each step begins in a new folder, so that no package has anything of an earlier build. Then both packages are compared
with git: a file that git does not have, a missing file, or a file with another content is an error.

The wheel has the codec's module in C, and is for one Python, if there is a compiler. With TRUENEXT_SPEEDUPS=0 it is for
all systems.

The page of a package on an index shows the README, but not the other pages. So links to other pages lead to REPOSITORY
(`make dist REPOSITORY=https://HOST/OWNER/truenext`). Without it they become names of files.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[1]
README = "README.md"
SOURCE = "src/"

_LINK = re.compile(r"\[([^\]]+)\]\((?![a-z]+://|#)([^)#\s]+)(#[^)\s]*)?\)")
_FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
_MADE_IN_SDIST = re.compile(r"PKG-INFO|setup\.cfg|src/truenext\.egg-info/.*")
_SPEEDUPS = re.compile(r"truenext/wire/stomp/_speed\.[^/]+\.(so|pyd)")
_MADE_IN_WHEEL = re.compile(rf"truenext-[^/]+\.dist-info/.*|{_SPEEDUPS.pattern}")
_NOT_IN_WHEEL = re.compile(r".*\.c")
_NOT_IN_SDIST = re.compile(r"\..*")
"""Files of git that no sdist has: those of git itself and of a service for continuous integration."""


class DistError(Exception):
    """Packages cannot be built, or differ from git."""


def build(root: Path, to: Path, *, repository: str = "", has_speedups: bool = True) -> tuple[Path, Path]:
    """Build the sdist and, from it, the wheel. They replace those in the folder `to`. Returns their paths.

    Raises: DistError if a build fails, or a package differs from git
    """
    files = tracked_files(root)
    with tempfile.TemporaryDirectory(prefix="truenext-dist-") as name:
        folder = Path(name)
        tree = folder / "tree"
        _copy(root, files, tree)
        readme = tree / README
        readme.write_text(without_relative_links(readme.read_text(), repository))
        contents = {each: (tree / each).read_bytes() for each in files}
        sdist = _build(tree, "sdist", folder / "sdist")
        _raise_faults(sdist, faults_of_sdist(_read_sdist(sdist), contents))
        wheel = _build_wheel(sdist, folder / "wheel", has_speedups=has_speedups)
        _raise_faults(wheel, faults_of_wheel(_read_wheel(wheel), contents))
        to.mkdir(parents=True, exist_ok=True)
        for earlier in to.glob("truenext-*"):
            earlier.unlink()
        return Path(shutil.copy(sdist, to)), Path(shutil.copy(wheel, to))


def tracked_files(root: Path) -> list[str]:
    """Return the names of git's files in a working copy.

    Raises: DistError if the folder is no working copy of git, or one of the files is missing there
    """
    command = ["git", "ls-files", "-z"]
    try:
        done = subprocess.run(command, cwd=root, capture_output=True, check=True, text=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise DistError("packages are built from the files that git knows: build them in a clone, with git") from error
    names = [name for name in done.stdout.split("\0") if name]
    if missing := [name for name in names if not (root / name).is_file()]:
        raise DistError(
            f"the working copy lacks {', '.join(missing)}, which git has: restore this (`git restore`), or remove it "
            "from git (`git rm`)"
        )
    return names


def without_relative_links(text: str, repository: str) -> str:
    """Return Markdown without links to files beside it.

    >>> without_relative_links("[Users](docs/security.md#tls), [docs/jms.md](docs/jms.md)", "")
    'Users (docs/security.md), docs/jms.md'
    >>> without_relative_links("[Users](docs/security.md#tls)", "https://example.org/truenext/")
    '[Users](https://example.org/truenext/blob/main/docs/security.md#tls)'
    """
    base = repository.rstrip("/")

    def replaced(found: re.Match[str]) -> str:
        label, target, anchor = found[1], found[2], found[3] or ""
        if base:
            return f"[{label}]({base}/blob/main/{target}{anchor})"
        return label if target in label else f"{label} ({target})"

    pieces = _FENCE.split(text)
    fences = [*_FENCE.findall(text), ""]
    return "".join(_LINK.sub(replaced, piece) + fence for piece, fence in zip(pieces, fences, strict=True))


def faults_of_sdist(packed: Mapping[str, bytes], tracked: Mapping[str, bytes]) -> Iterator[str]:
    """Return the differences between the files of an sdist and those of git."""
    expected = {name: content for name, content in tracked.items() if not _NOT_IN_SDIST.fullmatch(name)}
    yield from _differences({name: packed[name] for name in packed if not _MADE_IN_SDIST.fullmatch(name)}, expected)


def faults_of_wheel(packed: Mapping[str, bytes], tracked: Mapping[str, bytes]) -> Iterator[str]:
    """Return the differences between the files of a wheel and those of git."""
    expected = {
        name.removeprefix(SOURCE): content
        for name, content in tracked.items()
        if name.startswith(SOURCE) and not _NOT_IN_WHEEL.fullmatch(name)
    }
    yield from _differences({name: packed[name] for name in packed if not _MADE_IN_WHEEL.fullmatch(name)}, expected)


def _differences(packed: Mapping[str, bytes], expected: Mapping[str, bytes]) -> Iterator[str]:
    for name in sorted({*packed, *expected}):
        if name not in expected:
            yield f"{name} is not in git"
        elif name not in packed:
            yield f"{name} is missing"
        elif packed[name] != expected[name]:
            yield f"{name} differs from git's"


def _raise_faults(package: Path, faults: Iterable[str]) -> None:
    if found := list(faults):
        raise DistError("\n".join(f"{package.name}: {each}" for each in found))


def _copy(root: Path, files: Iterable[str], to: Path) -> None:
    for name in files:
        (to / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(root / name, to / name)


def _build_wheel(sdist: Path, to: Path, *, has_speedups: bool) -> Path:
    to.mkdir()
    wheel = _build(_unpack(sdist, to / "source"), "wheel", to / "built", has_speedups=has_speedups)
    if has_speedups and not any(_SPEEDUPS.fullmatch(name) for name in _read_wheel(wheel)):
        # Without a compiler the wheel still has the tags of one Python and one system.
        wheel = _build(_unpack(sdist, to / "source-for-all"), "wheel", to / "built-for-all", has_speedups=False)
    return wheel


def _build(source: Path, kind: str, to: Path, *, has_speedups: bool = True) -> Path:
    """Build one package with the build backend, in a process of its own. The backend must be installed here."""
    to.mkdir()
    program = f"import sys; from setuptools import build_meta; build_meta.build_{kind}(sys.argv[1])"
    command = [sys.executable, "-W", "ignore", "-c", program, str(to)]
    environment = os.environ | {"TRUENEXT_SPEEDUPS": "1" if has_speedups else "0"}
    done = subprocess.run(
        command, cwd=source, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    if done.returncode:
        raise DistError(f"the {kind} was not built:\n{done.stdout}")
    (package,) = to.iterdir()
    return package


def _unpack(sdist: Path, to: Path) -> Path:
    with tarfile.open(sdist) as archive:
        archive.extractall(to, filter="data")
    (source,) = to.iterdir()
    return source


def _read_sdist(sdist: Path) -> dict[str, bytes]:
    with tarfile.open(sdist) as archive:
        files = {each.name.partition("/")[2]: archive.extractfile(each) for each in archive if each.isfile()}
        return {name: file.read() for name, file in files.items() if file is not None}


def _read_wheel(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def main() -> None:
    parser = argparse.ArgumentParser(description="Build the sdist, and the wheel from it.")
    parser.add_argument("--to", type=Path, default=ROOT / "dist", help="folder of the packages")
    parser.add_argument("--repository", default="", help="address of the repository, for links of the README")
    options = parser.parse_args()
    try:
        has_speedups = os.environ.get("TRUENEXT_SPEEDUPS") != "0"
        packages = build(ROOT, options.to, repository=options.repository, has_speedups=has_speedups)
    except DistError as error:
        sys.exit(str(error))
    for each in packages:
        print(f"{each.stat().st_size:>10,} bytes  {each}")


if __name__ == "__main__":
    main()
