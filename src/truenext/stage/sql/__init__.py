"""SQL of stages: the database of a service, and one transaction for each message (docs/stages-database.md).

`Database` is one database with its connection pools. Its methods `new_async_work()` and `new_thread_work()` return the
SQL transaction for one message, which is called its work. All modules but `truenext.stage.sql.errors` need SQLAlchemy,
so they are imported when one of their names is first used.
"""

import importlib
from typing import TYPE_CHECKING

from truenext.errors import ConfigurationError

if TYPE_CHECKING:
    from truenext.stage.sql.database import Database as Database
    from truenext.stage.sql.outbox_report import outbox_report as outbox_report
    from truenext.stage.sql.reply_table import keep_reply as keep_reply
    from truenext.stage.sql.session import session_type as session_type
    from truenext.stage.sql.session_outbox import SessionOutbox as SessionOutbox
    from truenext.stage.sql.tables import apply_schema as apply_schema
    from truenext.stage.sql.tables import schema_sql as schema_sql

_MODULES = {
    "Database": "truenext.stage.sql.database",
    "SessionOutbox": "truenext.stage.sql.session_outbox",
    "keep_reply": "truenext.stage.sql.reply_table",
    "apply_schema": "truenext.stage.sql.tables",
    "outbox_report": "truenext.stage.sql.outbox_report",
    "schema_sql": "truenext.stage.sql.tables",
    "session_type": "truenext.stage.sql.session",
}


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        found: object = getattr(importlib.import_module(_MODULES[name]), name)
    except ImportError as error:
        # SQLAlchemy reports in its own words, without a module's name, that greenlet is missing.
        cause = error if error.name is not None or not isinstance(error.__cause__, ImportError) else error.__cause__
        if cause.name is None or cause.name.partition(".")[0] not in ("sqlalchemy", "greenlet"):
            raise
        raise ConfigurationError(
            f"there is no {cause.name} for stages with a database: pip install 'truenext[sql]'"
        ) from error
    globals()[name] = found
    return found
