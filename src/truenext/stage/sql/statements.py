"""Which statements would begin or end the transaction, which is not the function's to say?"""

import re

_COMMENT = r"--[^\n]*(?:\n|$) | /\*.*?\*/"
# What may contain any word and says nothing: strings, also PostgreSQL's E'...' in which a backslash escapes, quoted
# names, comments, PostgreSQL's dollar quotes.
_IGNORED = re.compile(
    rf"""\b[eE]'(?:[^'\\]|''|\\.)*' | '(?:[^']|'')*' | "(?:[^"]|"")*" | {_COMMENT}
    | (?P<dollar>\$\w*\$).*?(?P=dollar)""",
    re.DOTALL | re.VERBOSE,
)
# SQLite reads over a byte order mark.
_START = rf"(?:\s | \ufeff | {_COMMENT})*"
# What a trigger or a function does when it is called: BEGIN and END are its brackets.
_BODY = re.compile(
    rf"""(?:^|;){_START} CREATE\s[^;]*?\b(?:TRIGGER|FUNCTION|PROCEDURE)\b .*? \bBEGIN\b .* \bEND\b""",
    re.IGNORECASE | re.DOTALL | re.VERBOSE,
)
_SAVEPOINT = r"ROLLBACK\s+(?:(?:WORK|TRANSACTION)\s+)?TO\b"
_FORBIDDEN = re.compile(
    rf"""{_START}
    (?: BEGIN\b | START\s+TRANSACTION\b | COMMIT\b | END\b | ABORT\b | (?!{_SAVEPOINT})ROLLBACK\b
      | PREPARE\s+TRANSACTION\b | SET\s[^;]*\bAUTOCOMMIT\b )""",
    re.IGNORECASE | re.DOTALL | re.VERBOSE,
)


def find_transaction_statement(statement: str) -> str | None:
    """The part of `statement` that would begin or end a transaction; None if there is none.

    It knows SQL's words, and no more: what a procedure or the driver itself does is seen afterwards, by its effect.
    """
    if ";" not in statement:
        return statement.strip() if _FORBIDDEN.match(statement) else None
    for part in _BODY.sub(";", _IGNORED.sub(" ", statement)).split(";"):
        if _FORBIDDEN.match(part):
            return part.strip()
    return None
