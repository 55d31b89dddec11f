"""What stages do in a database (docs/stages-sql.md).

`Database` is one database with its pools; `database.task_work()` and `database.thread_work()` are what one message does
in it. What is here needs SQLAlchemy, except `truenext.stage.sql.errors`: so it is loaded when one of its names is asked
for.
"""

import importlib
from typing import TYPE_CHECKING

from truenext.errors import ConfigurationError

if TYPE_CHECKING:
    from truenext.stage.sql.database import Database
    from truenext.stage.sql.looking import look
    from truenext.stage.sql.own_transaction import InTransaction
    from truenext.stage.sql.session import session_type
    from truenext.stage.sql.tables import applied_schema, schema_sql
    from truenext.stage.sql.trouble import trouble_of
    from truenext.stage.sql.work import TaskWork, ThreadWork

__all__ = [
    "Database",
    "InTransaction",
    "TaskWork",
    "ThreadWork",
    "applied_schema",
    "look",
    "schema_sql",
    "session_type",
    "trouble_of",
]

_HOMES = {
    "Database": "truenext.stage.sql.database",
    "InTransaction": "truenext.stage.sql.own_transaction",
    "TaskWork": "truenext.stage.sql.work",
    "ThreadWork": "truenext.stage.sql.work",
    "applied_schema": "truenext.stage.sql.tables",
    "look": "truenext.stage.sql.looking",
    "schema_sql": "truenext.stage.sql.tables",
    "session_type": "truenext.stage.sql.session",
    "trouble_of": "truenext.stage.sql.trouble",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        found: object = getattr(importlib.import_module(_HOMES[name]), name)
    except ImportError as error:
        # SQLAlchemy says in its own words, and without a name, that greenlet is missing.
        cause = error if error.name is not None or not isinstance(error.__cause__, ImportError) else error.__cause__
        if cause.name is None or cause.name.partition(".")[0] not in ("sqlalchemy", "greenlet"):
            raise
        raise ConfigurationError(
            f"there is no {cause.name} for stages with a database: pip install 'truenext[sql]'"
        ) from error
    globals()[name] = found
    return found
