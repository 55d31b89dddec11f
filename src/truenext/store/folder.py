"""Data folder: made for its owner only, and locked by one broker at a time. A new file gets its name once the file is
complete and durable."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Callable
from pathlib import Path

from truenext.errors import ConfigurationError, StoreInUseError

OWN_FILES = frozenset({"lock", "journal", "lmdb", "ballast", "new", "history", "seed", "origin", "origin-new"})
"""Files that a broker makes in a data folder. An interrupted first start may leave some of these files. `new` is the
name of the ballast while it is being made, `seed` that of a checkpoint, `origin-new` that of `origin`."""

MANIFEST = "manifest"
"""File in each backup that is complete. In others it is called `manifest-new`."""

ASIDE = "aside-"
"""Beginning of the name of a folder in which an earlier content of the data folder was kept."""

IGNORED_FILES = frozenset({"lost+found", "truenext.toml", ".gitkeep"})
"""Other files that a data folder may have: the file system's own folder, the configuration file, git's placeholder."""

FOREIGN_FILES_SHOWN = 3
"""Number of foreign files that an error names."""

MOUNTS = Path("/proc/self/mountinfo")
"""File with one line for each mounted file system. Only Linux has such a file. Source: proc_pid_mountinfo(5)"""

NETWORK_FILE_SYSTEMS = frozenset(
    {
        "afs",
        "ceph",
        "cifs",
        "fuse.ceph",
        "fuse.glusterfs",
        "fuse.s3fs",
        "fuse.sshfs",
        "gfs2",
        "lustre",
        "nfs",
        "nfs4",
        "ocfs2",
        "smb3",
    }
)
"""Types of file systems that other machines may mount, too. Containers and virtual machines have others of `fuse`, 9p
and virtiofs for disks of their own machine."""

_ZEROS = bytes(1 << 20)


def make(path: Path) -> None:
    """Make the folder and its missing parents, durably. Raises: OSError if a folder cannot be made"""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    for folder in (path, *(folder.parent for folder in missing)):
        sync_folder(folder)


def check_no_foreign_files(path: Path) -> None:
    """Check a folder that no broker has used before: it may not have files of other programs.

    Raises: ConfigurationError if there are such files; OSError if the folder cannot be read
    """
    if not path.is_dir():
        return
    check_is_no_backup(path)
    names = {each.name for each in path.iterdir() if not each.name.startswith(ASIDE)}
    foreign = sorted(names - OWN_FILES - IGNORED_FILES)
    # A folder with these three is a broker's, whatever other files were put into it.
    if not foreign or names >= {"lock", "journal", "lmdb"}:
        return
    shown = ", ".join(foreign[:FOREIGN_FILES_SHOWN]) + (", ..." if len(foreign) > FOREIGN_FILES_SHOWN else "")
    raise ConfigurationError(
        f"data folder {path} has files that are not truenext's: {shown}; name an empty folder, or that of a broker"
    )


def check_is_no_backup(path: Path) -> None:
    """Check that a folder is no backup, not even a part of one: a broker would change it.

    Raises: ConfigurationError if it is one
    """
    has_manifest = (path / MANIFEST).exists() or (path / f"{MANIFEST}-new").exists()
    # A data folder may have a file of this name of another program.
    if has_manifest and not (path / "lock").exists():
        raise ConfigurationError(
            f"{path} is a backup: `truenext restore {path} NEW` makes a data folder of it, if it is complete"
        )


def check_is_local(path: Path, mounts: Path = MOUNTS) -> None:
    """Check that a folder, or that in which it will be made, is on a file system of this machine alone. A file system
    of which nothing is known counts as local.

    Raises: ConfigurationError if it is on a network file system
    """
    kind = file_system(path, mounts)
    if kind in NETWORK_FILE_SYSTEMS:
        raise ConfigurationError(
            f"data folder {path} is on a network file system ({kind}), where a lock does not keep a second machine "
            "away: name a folder on a disk of this machine, or make sure that no other machine uses it, and add "
            "--allow-network-disk"
        )


def file_system(path: Path, mounts: Path = MOUNTS) -> str:
    """Return the type of the file system of the first of a folder and its parents that is there; "" if unknown."""
    folders = (path.absolute(), *path.absolute().parents)
    # Unlike `Path.exists`, `access` raises nothing for a folder that may not be read.
    device = next(each for each in folders if os.access(each, os.F_OK)).stat().st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    lines = mounts.read_text(errors="replace").splitlines() if mounts.exists() else []
    return next((line.partition(" - ")[2].split()[0] for line in lines if line.split()[2] == number), "")


def lock(path: Path) -> int:
    """Lock the folder, and return the open lock file. Closing the file, or the end of the process, unlocks the folder.

    Raises: StoreInUseError if another process holds the lock; ConfigurationError if the file is a symbolic link, or the
    folder is a backup; OSError if it cannot be written
    """
    check_is_no_backup(path)
    try:
        file = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        # The lock would overwrite the file to which the link points.
        raise ConfigurationError(f"{path / 'lock'} is a symbolic link: remove it") from error
    try:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = os.pread(file, 20, 0).decode(errors="replace").strip() or "unknown"
            raise StoreInUseError(
                f"data folder {path} is in use by the broker of process {holder}: stop it, or use another folder"
            ) from error
        os.truncate(file, 0)
        os.pwrite(file, b"%d\n" % os.getpid(), 0)
    except BaseException:
        os.close(file)
        raise
    return file


def is_writable_by_others(path: Path) -> bool:
    """Return whether other users of this machine may make or remove files in the folder."""
    return bool(path.stat().st_mode & 0o022)


def is_data_folder(path: Path) -> bool:
    """Return whether a broker has used the folder before."""
    return (path / "lmdb").is_dir() or (path / "journal").is_dir()


def has_journal(data: Path) -> bool:
    journal = data / "journal"
    return journal.is_dir() and any(journal.iterdir())


def sync_folder(path: Path) -> None:
    """Make the names of a folder's files durable. After a power cut a file may be missing if only the file was synced.

    Raises: OSError if the disk fails
    """
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def allocate(path: Path, size: int) -> None:
    """Make a file of `size` zeros, all written to the disk. The file gets its name once it is complete.

    Raises: OSError if the disk is full or fails; then there is no file
    """
    _make(path, lambda file: clear(file, 0, size))


def reserve(path: Path, size: int) -> None:
    """Make a file that only reserves `size` bytes of disk. The bytes are not written if the system can reserve space
    without writing.

    Raises: OSError if the disk is full or fails; then there is no file
    """
    if hasattr(os, "posix_fallocate"):
        _make(path, lambda file: os.posix_fallocate(file, 0, size))
    else:
        allocate(path, size)


def _make(path: Path, fill: Callable[[int], None]) -> None:
    new = path.with_name("new")
    file = os.open(new, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        fill(file)
        os.fsync(file)
    except OSError:
        new.unlink()
        raise
    finally:
        os.close(file)
    new.rename(path)


def clear(file: int, start: int, end: int) -> None:
    """Write zeros from byte `start` to byte `end`. Raises: OSError if the disk fails"""
    for offset in range(start, end, len(_ZEROS)):
        write(file, _ZEROS[: end - offset], offset)


def is_clear(block: bytes) -> bool:
    """Return whether a block of at most 1 MiB has only zeros. A comparison takes a hundredth of the time of `strip`."""
    return block == _ZEROS[: len(block)]


def write(file: int, content: bytes, offset: int) -> None:
    """Write all of `content` at `offset`. Raises: OSError if the disk is full or fails"""
    written = os.pwrite(file, content, offset)
    while written < len(content):
        # If the disk is full or fails, writing the rest raises the error.
        written += os.pwrite(file, content[written:], offset + written)


def free_bytes(path: Path) -> int:
    """Return the number of bytes that users other than root may use on the disk of `path`. Raises: OSError if it cannot
    be read"""
    disk = os.statvfs(path)
    return disk.f_bavail * disk.f_frsize
