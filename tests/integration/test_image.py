"""Tests of the image, which buildah builds and a namespace of its own runs: `make packages`.

The broker of the image runs as in a container: its root is read-only, its user has no rights, and it is process 1. Only
the volume can be written to. TRUENEXT_BASE names another base than that of the Containerfile, and TRUENEXT_BUILD has
more options of `buildah build`, such as --volume for an index of packages.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.broker_process import PATIENCE_SECONDS, dying_with_us
from tests.integration.environments import ROOT

MAX_BYTES = 200_000_000
USER = 65532


def missing() -> str:
    """Return why this machine cannot try the image; "" if it can."""
    if "TRUENEXT_PACKAGES" not in os.environ:
        return "make packages: a build takes minutes, and a network"
    if os.geteuid() != 0:
        return "only root can mount an image"
    absent = [each for each in ("buildah", "ip", "nsenter", "setpriv", "unshare") if shutil.which(each) is None]
    return f"not installed: {', '.join(absent)}" if absent else ""


pytestmark = [pytest.mark.skipif(missing() != "", reason=missing() or "it can"), pytest.mark.timeout(1800)]

# Process 1 of a new process namespace, in a read-only root with /proc, /dev/null and the volume.
RUN = """
set -eu
ip link set lo up
root=$1 volume=$2; shift 2
mount --bind "$root" "$root"
mount -t proc proc "$root/proc"
mount -t tmpfs -o mode=0755 dev "$root/dev"
for each in null urandom; do touch "$root/dev/$each"; mount --bind "/dev/$each" "$root/dev/$each"; done
mount --bind "$volume" "$root/data"
mount -o remount,bind,ro "$root"
cd "$root"
exec setpriv --no-new-privs chroot --userspec=65532:65532 --groups=65532 . "$@"
"""


def buildah(*arguments: str) -> str:
    done = subprocess.run(["buildah", *arguments], capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.strip()


class Image:
    def __init__(self, name: str) -> None:
        self.name = name
        inspected: dict[str, Any] = json.loads(buildah("inspect", "--type", "image", name))
        self.configuration = inspected["Docker"]["config"]
        self._container = buildah("from", "--pull-never", name)
        self.root = Path(buildah("mount", self._container))

    def remove(self) -> None:
        buildah("rm", self._container)
        buildah("rmi", self.name)

    def command(self, volume: Path, *words: str, network_of: int | None = None) -> list[str]:
        """Return a command that runs the image, in a network of its own or that of a process. `words` are the arguments
        of its entry point."""
        environment = [f"env={each}" for each in self.configuration["Env"]]
        variables = [each.removeprefix("env=") for each in environment]
        inside = ["/usr/bin/env", "-i", *variables, *self.configuration["Entrypoint"], *words]
        unshare = ["unshare", "--mount", "--pid", "--net", "--fork", "--kill-child", "--propagation", "private"]
        if network_of is not None:
            unshare = ["nsenter", "--target", str(network_of), "--net", *(each for each in unshare if each != "--net")]
        return [*unshare, "sh", "-c", RUN, "sh", str(self.root), str(volume), *inside]


@pytest.fixture(scope="module")
def image() -> Iterator[Image]:
    name = f"localhost/truenext-test-{os.getpid()}"
    base = os.environ.get("TRUENEXT_BASE")
    options = shlex.split(os.environ.get("TRUENEXT_BUILD", ""))
    if base:
        options += ["--build-arg", f"BASE={base}"]
    build = ["buildah", "build", "--format", "docker", "--isolation", "chroot", *options, "--tag", name, "."]
    done = subprocess.run(build, capture_output=True, text=True, check=False, cwd=ROOT)
    if not base and "initializing source docker://" in done.stderr:
        reason = done.stderr.strip().rpartition(": ")[2]
        pytest.skip(f"the base cannot be pulled ({reason}): name another one (make packages BASE=image)")
    assert done.returncode == 0, done.stdout + done.stderr
    image = Image(name)
    yield image
    image.remove()


@pytest.fixture
def volume(tmp_path: Path) -> Path:
    """New volume, which gets the owner and mode of the folder in the image."""
    volume = tmp_path / "volume"
    volume.mkdir(mode=0o700)
    os.chown(volume, USER, USER)
    return volume


class Container:
    """Running broker of an image."""

    def __init__(self, image: Image, volume: Path, folder: Path) -> None:
        self._image, self._volume = image, volume
        self.out, self.log = folder / "out", folder / "log"
        with self.out.open("wb") as out, self.log.open("wb") as log:
            command = image.command(volume, *image.configuration["Cmd"])
            command[0] = str(shutil.which(command[0]))
            self.process = subprocess.Popen(dying_with_us(command), stdin=subprocess.DEVNULL, stdout=out, stderr=log)
        deadline = time.monotonic() + PATIENCE_SECONDS
        while "listening on" not in self.out.read_text():
            assert self.process.poll() is None and time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.01)

    def __enter__(self) -> Container:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            # Not only `unshare`: a process that has changed its user does not die with its parent.
            self.end(signal.SIGKILL)

    @property
    def pid(self) -> int:
        """Number of the broker, the child of `unshare`."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text()
        return int(children.split()[0])

    def truenext(self, *words: str) -> str:
        """Run a command in a container with the network of the broker."""
        command = self._image.command(self._volume, *words, network_of=self.pid)
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def end(self, number: signal.Signals) -> int:
        os.kill(self.pid, number)
        return self.process.wait(PATIENCE_SECONDS)


def bytes_of(folder: Path) -> int:
    done = subprocess.run(
        ["du", "--summarize", "--bytes", "--one-file-system", str(folder)], capture_output=True, text=True, check=True
    )
    return int(done.stdout.split()[0])


def test_image_is_small(image: Image) -> None:
    size = bytes_of(image.root)
    own = bytes_of(image.root / "opt" / "truenext")
    print(f"image: {size / 1e6:.0f} MB, {own / 1e6:.0f} MB of them truenext; the rest is the base")
    # A base that a test names may have any size.
    assert (own if os.environ.get("TRUENEXT_BASE") else size) <= MAX_BYTES


def test_image_has_the_user_volume_and_health_check_of_its_file(image: Image) -> None:
    configuration = image.configuration
    assert (configuration["User"], list(configuration["Volumes"])) == (f"{USER}:{USER}", ["/data"])
    assert configuration["Healthcheck"]["Test"][:3] == ["CMD", "python3", "-c"]
    data = image.root / "data"
    assert (data.stat().st_uid, data.stat().st_mode & 0o777) == (USER, 0o700)
    assert not list((image.root / "opt" / "truenext").glob("lib/python3.*/site-packages/pip"))


def test_broker_of_the_image_is_stopped_killed_and_started_again_on_its_volume(
    image: Image, volume: Path, tmp_path: Path
) -> None:
    with Container(image, volume, tmp_path) as first:
        status = Path(f"/proc/{first.pid}/status").read_text()
        assert re.search(rf"^Uid:\s+{USER}\s", status, re.MULTILINE)
        assert re.search(r"^CapEff:\s+0+$", status, re.MULTILINE) and re.search(r"^NSpid:.*\s1$", status, re.MULTILINE)
        first.truenext("send", "orders", "before the stop", "--transient")
        assert "codec      in C\n" in first.truenext("status")
        assert first.end(signal.SIGTERM) == 0
    with Container(image, volume, tmp_path) as second:
        assert second.truenext("receive", "orders", "--all") == "before the stop\n"
        second.truenext("send", "orders", "before the kill")
        assert second.end(signal.SIGKILL) != 0
    with Container(image, volume, tmp_path) as third:
        assert third.truenext("receive", "orders", "--all") == "before the kill\n"
        assert third.end(signal.SIGTERM) == 0
        assert third.log.read_text() == ""


def test_broker_of_the_image_on_a_foreign_volume_names_the_owner(image: Image, tmp_path: Path) -> None:
    volume = tmp_path / "volume"
    volume.mkdir(mode=0o755)
    command = image.command(volume, *image.configuration["Cmd"])
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=False)
    assert done.returncode == 1
    assert "the user 65532 needs the right to read and write /data, which belongs to root" in done.stderr
