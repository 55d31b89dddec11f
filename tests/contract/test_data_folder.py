"""Tests that folders with foreign files are left alone, and empty ones and a broker's own used."""

import os
from pathlib import Path

import pytest

from truenext.errors import ConfigurationError
from truenext.store.embedded import EmbeddedStore
from truenext.store.folder import IGNORED_FILES, OWN_FILES, check_is_local


def use(folder: Path) -> None:
    store = EmbeddedStore(folder)
    store.recover()
    store.close()


@pytest.mark.parametrize("name", ["letter.txt", ".profile", "unfinished", "lock.old", "journal2"])
def test_a_folder_with_others_files_is_refused_by_name_and_left_as_it_is(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("mine")
    with pytest.raises(ConfigurationError, match=rf"{tmp_path} has files that are not truenext's: {name}; name an "):
        use(tmp_path)
    assert [each.name for each in tmp_path.iterdir()] == [name]


def test_error_names_only_the_first_of_many_foreign_files(tmp_path: Path) -> None:
    for name in "edcba":
        (tmp_path / name).touch()
    with pytest.raises(ConfigurationError, match=r"truenext's: a, b, c, \.\.\.; name"):
        use(tmp_path)


def test_a_folder_that_is_empty_or_not_there_is_used(tmp_path: Path) -> None:
    use(tmp_path)
    use(tmp_path / "new" / "folder")


@pytest.mark.parametrize("name", sorted(IGNORED_FILES))
def test_ignored_files_may_be_in_a_data_folder(tmp_path: Path, name: str) -> None:
    (tmp_path / name).touch()
    use(tmp_path)


def test_folder_left_by_a_crash_during_the_first_start_is_used(tmp_path: Path) -> None:
    """Each moment of it: the files that it makes at the top are there or are not, in the order in which they come."""
    made: list[str] = []
    use(tmp_path / "first")
    for each in sorted((tmp_path / "first").iterdir(), key=lambda each: each.stat().st_ctime_ns):
        made.append(each.name)
    assert set(made) <= OWN_FILES
    for count in range(len(made)):
        folder = tmp_path / f"crashed-{count}"
        folder.mkdir()
        for name in made[:count]:
            is_folder = (tmp_path / "first" / name).is_dir()
            (folder / name).mkdir() if is_folder else (folder / name).touch()
        use(folder)


def test_folder_of_a_broker_is_used_in_spite_of_foreign_files(tmp_path: Path) -> None:
    use(tmp_path)
    (tmp_path / "README").touch()
    use(tmp_path)


def test_lock_that_is_a_symbolic_link_is_refused_and_its_target_left_as_it_is(tmp_path: Path) -> None:
    target = tmp_path / "letter.txt"
    target.write_text("mine")
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "lock").symlink_to(target)
    with pytest.raises(ConfigurationError, match=r"data/lock is a symbolic link: remove it"):
        use(folder)
    assert target.read_text() == "mine"


def mounts_with(folder: Path, kind: str) -> Path:
    """Make a table of mounted file systems, in which that of `folder` has this type."""
    device = folder.stat().st_dev
    table = folder / "mountinfo"
    table.write_text(
        "22 27 0:4095 / /proc rw,relatime - proc proc rw\n"
        f"27 1 {os.major(device)}:{os.minor(device)} / /a\\040b rw,relatime shared:1 master:2 - {kind} server:/c rw\n"
    )
    return table


@pytest.mark.parametrize("kind", ["nfs", "nfs4", "cifs", "smb3", "gfs2", "fuse.sshfs"])
def test_folder_on_a_network_file_system_is_refused(tmp_path: Path, kind: str) -> None:
    """C28.19, also before the folder is made."""
    mounts = mounts_with(tmp_path, kind)
    for folder in (tmp_path, tmp_path / "new" / "folder"):
        with pytest.raises(ConfigurationError, match=rf"{folder} is on a network file system \({kind}\)"):
            check_is_local(folder, mounts)


@pytest.mark.parametrize("kind", ["ext4", "tmpfs", "fuseblk", "fuse.fuse-overlayfs", "9p", "virtiofs"])
def test_folder_on_a_local_file_system_is_accepted(tmp_path: Path, kind: str) -> None:
    check_is_local(tmp_path, mounts_with(tmp_path, kind))


def test_folder_is_accepted_where_the_system_does_not_say_its_file_system(tmp_path: Path) -> None:
    check_is_local(tmp_path, tmp_path / "not there")
    (tmp_path / "mountinfo").touch()
    check_is_local(tmp_path, tmp_path / "mountinfo")
