"""Generator of the client for threads from the client for tasks: `make generate`.

The rules are applied one after the other to client/tasks/connection.py. A rule without a match is an error, and so
is any rest of asyncio. ruff drops the imports that threads do not need, and formats.
"""

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

CLIENT = Path(__file__).parents[1] / "src" / "truenext" / "client"
SOURCE = CLIENT / "tasks" / "connection.py"
TARGET = CLIENT / "threads" / "connection.py"
_HEAD = '''"""Connection of a program with threads: `truenext.blocking`.

Generated from client/tasks/connection.py by `make generate`: change that file instead.
"""'''


def _dedent_body(match: re.Match[str]) -> str:
    return re.sub(r"^    ", "", match["body"], flags=re.MULTILINE)


_RULES: tuple[tuple[str, str | Callable[[re.Match[str]], str]], ...] = (
    (r'\A"""(?s:.*?)"""', _HEAD),
    # Removes features of tasks: a parameter with its paragraph of a docstring, and awaitable objects.
    (r"^ *heartbeat_thread[:=].*\n", ""),
    (r"(?<=\n\n)(?:.+\n)*?.*`heartbeat_thread`.*\n(?:.+\n)*\n", ""),
    (r" \| AsyncIterable\[[^\]]*\]", ""),
    (r"\beach\((\w+)\)", r"\1"),
    (r"\bAwaitable\[None\]", "None"),
    # Objects that are made when awaited are made at once.
    (r"^( *)async def make\(\) -> .*:\n(?P<body>(?:\1    .*\n)+)\n\1return AwaitableContext\(make\)\n", _dedent_body),
    (r"\bAwaitableContext\[(\w+)\]", r"\1"),
    # `await sent` is `sent.wait()`.
    (r"\b__await__\(self\) -> Generator\[None, None, None\]", "wait(self) -> None"),
    (r"\.__await__\(\)", ""),
    (r"`await (\w+)`", r"`\1.wait()`"),
    # Owner of received and sent messages, and the clock.
    (r"^import asyncio\n", "from threading import current_thread\nfrom truenext.clock import monotonic\n"),
    (r"\basyncio\.current_task\([\w.]*driver\.loop\)", "current_thread()"),
    (r"[\w.]*driver\.loop\.time\(\)", "monotonic()"),
    # The grammar.
    (r"\basync (def|with|for)\b", r"\1"),
    (r"\bawait ", ""),
    (r"__a(enter|exit|iter|next)__", r"__\1__"),
    (r"\bStopAsyncIteration\b", "StopIteration"),
    (r"\bAsyncIterator\b", "Iterator"),
    (r"\btruenext\.client\.tasks\b", "truenext.client.threads"),
)
_OF_TASKS = re.compile(r"async|await\b|Await")


def threads_source() -> str:
    """Raises: ValueError"""
    text = SOURCE.read_text()
    for pattern, replacement in _RULES:
        text, count = re.subn(pattern, replacement, text, flags=re.MULTILINE)
        if not count:
            raise ValueError(f"a rule matches nothing in client/tasks/connection.py: {pattern}")
    text = _ruff("format", _ruff("check", text, "--fix", "--select", "F401,I"))
    if left_over := [line for line in text.splitlines() if _OF_TASKS.search(line)]:
        raise ValueError(f"there is no rule for {left_over}")
    return text


def _ruff(command: str, text: str, *options: str) -> str:
    arguments = [sys.executable, "-m", "ruff", command, *options, "--quiet", "--stdin-filename", str(TARGET), "-"]
    return subprocess.run(arguments, input=text, capture_output=True, text=True, check=True).stdout


if __name__ == "__main__":
    TARGET.write_text(threads_source())
