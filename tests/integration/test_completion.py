"""Tests of the scripts that complete the command line, in the shells that the machine has."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.integration.broker_process import TRUENEXT
from tests.integration.forked import completed_text

BASH = """
source "$1"
complete() {
    COMP_WORDS=($1 "$2"); COMP_CWORD=$((${#COMP_WORDS[@]} - 1)); COMPREPLY=()
    # bash has it only while it completes.
    compopt() { printf '%s ' compopt "$@"; echo; }
    _truenext_completion truenext
    echo "${COMPREPLY[@]}"
}
complete truenext redr
complete "truenext serve" --when-
complete "truenext serve --when-full" ""
complete "truenext serve --data" ""
"""
ZSH = 'autoload -U compinit; compinit -u -D; source "$1"; whence -w _truenext_completion'
FISH = 'source $argv[1]; complete --do-complete "truenext redr"'


def run_in(shell: str, program: str, tmp_path: Path) -> str:
    script = tmp_path / "script"
    script.write_text(completed_text("completion", shell).stdout)
    path = f"{Path(TRUENEXT).parent}{os.pathsep}{os.environ['PATH']}"
    arguments = [program, str(script)] if shell == "fish" else [program, shell, str(script)]
    done = subprocess.run(
        [shell, "-c", *arguments],
        env=os.environ | {"PATH": path, "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return done.stdout


def only_with(shell: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(shutil.which(shell) is None, reason=f"there is no {shell}")


@only_with("bash")
def test_bash_completes_commands_options_values_and_folders(tmp_path: Path) -> None:
    assert run_in("bash", BASH, tmp_path).splitlines() == [
        "redrive",
        "--when-full",
        "slow refuse",
        "compopt -o dirnames ",
        "",
    ]


@only_with("zsh")
def test_zsh_takes_the_script(tmp_path: Path) -> None:
    assert run_in("zsh", ZSH, tmp_path) == "_truenext_completion: function\n"


@only_with("fish")
def test_fish_completes_commands(tmp_path: Path) -> None:
    assert run_in("fish", FISH, tmp_path).startswith("redrive\t")


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_script_of_a_shell_that_is_not_here_calls_truenext(shell: str) -> None:
    assert f"_TRUENEXT_COMPLETE={shell}_complete" in completed_text("completion", shell).stdout


def test_unknown_shell_is_refused_with_the_known_ones() -> None:
    done = completed_text("completion", "tcsh")
    assert (done.returncode, done.stdout) == (2, "")
    assert "'tcsh' is not one of 'bash', 'zsh', 'fish'" in done.stderr
