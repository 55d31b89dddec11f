"""Reader of a page of docs/: executes its commands in a terminal and its programs in a folder, one after the other.

    ```console    commands behind `$ `, and what they print; `^C` is Ctrl-C, once what stands before it has come
    ```python     a program; if the text before it names its file, as `take.py`, it is saved there, else it runs at once
    ```text       behind a program that runs at once: what it prints

Port 61613 is replaced by the port of the test's broker. Process numbers, times and values that a broker makes up may
differ in the output.
"""

import difflib
import fcntl
import os
import re
import select
import shlex
import signal
import subprocess
import sys
import termios
import time
from pathlib import Path
from typing import NamedTuple

from tests.integration.broker_process import PATIENCE_SECONDS, TRUENEXT, dying_with_us
from tests.integration.environments import ROOT

PORT = "61613"
_PROMPT = "@ready@"
_FENCE = re.compile(r"((?:[^\n]+\n)*)\n?```([a-z]+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_FILE = re.compile(r"[Ss]ave[^.]*? as\s+`(\w+\.(?:py|java))`")


class Block(NamedTuple):
    language: str
    text: str
    file: str
    """File that the paragraph before names; empty if it names none."""


def _take_terminal() -> None:
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    # A shell that runs tests in the background has it ignored, and what is ignored stays so.
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def blocks_of(page: str) -> list[Block]:
    found = _FENCE.finditer((ROOT / page).read_text())
    return [Block(each[2], each[3], (_FILE.findall(each[1]) or [""])[-1]) for each in found]


def comparable(text: str) -> str:
    """Replace the parts of a text that differ from run to run."""
    for pattern, instead in (
        (r"^(\[\d+\]) \d+$", r"\1 PROCESS"),
        (r"\d\d:\d\d:\d\d", "TIME"),
        (r"\b\d+\.\d+s\b", "SECONDS"),
        (r"truenext-[0-9a-f]{8}-", "truenext-STORE-"),
        (r" on \S+ pid \d+$", " on HOST pid PROCESS"),
        (r"\b[0-9a-f]{32}\b", "ID"),
        (r"replies\.([a-z]+)\.[0-9a-f]{16}", r"replies.\1.PROCESS"),
        (r"\b\d{6,}\b", "NUMBER"),
        (r"^[ \t]*\n|[ \t]+$", ""),
    ):
        text = re.sub(pattern, instead, text, flags=re.MULTILINE)
    return text


class Folder:
    """Environment of a reader: a folder, an interpreter, and a broker with another URL than the page's."""

    def __init__(
        self, path: Path, url: str, python: str = sys.executable, *, patience_s: float = PATIENCE_SECONDS
    ) -> None:
        self.path = path
        self.url = url
        self.patience_s = patience_s
        """Longest time that a command may take."""
        self._python = python
        self._programs = path.parent / f"{path.name}.bin"
        path.mkdir()
        self._programs.mkdir()
        command = [python, TRUENEXT]
        self._write_program("python", f'exec {shlex.join(dying_with_us([python]))} "$@"')
        self._write_program("pytest", f'exec {shlex.join(dying_with_us([python, "-m", "pytest"]))} "$@"')
        self._write_program(
            "truenext",
            # Where a service finds its broker is said in its program.
            f'case "$1 $2" in\n"serve "*) set -- "$@" --listen {url};;\n"stages cron") set -- "$@" --url {url};;\n'
            f'"stages "*) ;;\n*) set -- "$@" --url {url};;\nesac\n'
            f'exec {shlex.join(dying_with_us(command))} "$@"',
        )

    def _write_program(self, name: str, text: str) -> None:
        program = self._programs / name
        program.write_text(f"#!/bin/sh\n{text}\n")
        program.chmod(0o755)

    def environment(self) -> dict[str, str]:
        return os.environ | {
            "PATH": f"{self._programs}:{os.environ['PATH']}",
            "PYTHONDONTWRITEBYTECODE": "1",
            "PYTEST_ADDOPTS": "-p no:cacheprovider",
            "PS1": _PROMPT,
            "PS2": "",
            "TERM": "dumb",
            "COLUMNS": "80",
        }

    def here(self, text: str) -> str:
        return text.replace(PORT, self.url.rpartition(":")[2])

    def there(self, text: str) -> str:
        return text.replace(self.url, f"stomp://127.0.0.1:{PORT}")

    def save(self, name: str, program: str) -> None:
        (self.path / name).write_text(self.here(program))

    def run(self, program: str) -> str:
        """Run a program, which must succeed, and return its output."""
        done = subprocess.run(
            [self._python, "-c", self.here(program)],
            cwd=self.path,
            env=self.environment(),
            capture_output=True,
            text=True,
            timeout=self.patience_s,
            check=False,
        )
        assert done.returncode == 0, f"{program}\n{done.stdout}{done.stderr}"
        return done.stdout


class Terminal:
    """Interactive shell: Ctrl-C reaches the program in the foreground."""

    def __init__(self, folder: Folder) -> None:
        self._folder = folder
        self._master, slave = os.openpty()
        # What is typed is not shown again, and Ctrl-C is no text.
        modes = termios.tcgetattr(slave)
        modes[3] &= ~termios.ECHO
        termios.tcsetattr(slave, termios.TCSANOW, modes)
        self._shell = subprocess.Popen(
            ["bash", "--norc", "--noprofile", "--noediting", "-i"],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            cwd=folder.path,
            env=folder.environment(),
            start_new_session=True,
            preexec_fn=_take_terminal,
        )
        os.close(slave)
        self._read()

    def do(self, text: str) -> str:
        """Execute the commands of a block, and return the block with their actual output."""
        shown = ""
        commands = re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]
        for command, expected in (each.split("\n", 1) for each in commands):
            shown += f"$ {command}\n"
            print(f"$ {command}", flush=True)  # pytest shows it if the test fails
            os.write(self._master, f"{command}\n".encode())
            before, interrupt, after = expected.rpartition("^C\n")
            if interrupt:
                shown += self._read(before, has_prompt=False) + interrupt
                os.write(self._master, b"\x03")
            # Of a program in the background the prompt comes at once, and what it says a moment later.
            shown += self._read(after if command.endswith("&") else None)
            self._wait_for_file_of(command)
        return shown

    def _wait_for_file_of(self, command: str) -> None:
        """Wait for the output file of a background command, which the shell makes a moment after its prompt."""
        _, redirected, file = command.removesuffix("&").rpartition(" >")
        deadline = time.monotonic() + self._folder.patience_s
        while redirected and command.endswith("&") and not (self._folder.path / file.strip()).exists():
            assert time.monotonic() < deadline, f"{command!r} makes no {file.strip()}"
            time.sleep(0.001)

    def _read(self, expected: str | None = None, *, has_prompt: bool = True) -> str:
        """Read until the prompt has come, and `expected` if given.

        Raises: AssertionError if they do not come in time
        """
        read = ""
        deadline = time.monotonic() + self._folder.patience_s
        while (remaining := deadline - time.monotonic()) > 0:
            text = read.replace(_PROMPT, "")
            is_all = expected is None or comparable(text) == comparable(expected)
            if is_all and (_PROMPT in read or not has_prompt):
                return text
            if select.select([self._master], [], [], remaining)[0]:
                chunk = os.read(self._master, 65536).decode().replace("\r\n", "\n")
                read = self._folder.there(read + chunk)
        description = "a prompt" if expected is None else f"this:\n{expected}"
        raise AssertionError(
            f"after {self._folder.patience_s:g} seconds there is only this:\n{read}\nand not {description}"
        )

    def close(self) -> None:
        """Kill the shell and the programs that run in it."""
        self._shell.send_signal(signal.SIGKILL)
        self._shell.wait()
        os.close(self._master)


def compare(shown: str, block: Block) -> None:
    page, here = (comparable(each).splitlines() for each in (block.text, shown))
    assert page == here, "\n".join(difflib.unified_diff(page, here, "the page", "here", n=20, lineterm=""))


def follow(page: str, folder: Folder) -> None:
    """Execute a page, and fail where the output differs from it."""
    terminal = Terminal(folder)
    try:
        printed: str | None = None
        for block in blocks_of(page):
            match block.language:
                case "python" if block.file:
                    folder.save(block.file, block.text)
                case "python":
                    printed = folder.run(block.text)
                case "text":
                    assert printed is not None, f"nothing ran before:\n{block.text}"
                    compare(printed, block)
                    printed = None
                case "console":
                    compare(terminal.do(block.text), block)
                case _:
                    pass
    finally:
        terminal.close()
