"""A broker in the test's own process, so that a test can look into it or break it."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from sys import maxsize
from typing import Any

from tests.integration import over_tls
from truenext.broker.broker import Broker
from truenext.broker.recovery import recover
from truenext.broker.users import Users
from truenext.history.writer import HistoryWriter
from truenext.model.limits import CONNECTIONS_BEFORE_LOGIN_MAX, CONNECTIONS_MAX
from truenext.model.policy import Policies
from truenext.model.url import parse_listener_url
from truenext.server.connection import ServerConnection
from truenext.server.listener import Listener, ListenerTls, Places
from truenext.store.embedded import EmbeddedStore
from truenext.store.log import Log
from truenext.store.memory import MemoryStore
from truenext.store.store import Store


@asynccontextmanager
async def broker_here(
    data: Path | None = None,
    *,
    connections_max: int = CONNECTIONS_MAX,
    before_login_max: int = CONNECTIONS_BEFORE_LOGIN_MAX,
    memory_limit: int = maxsize,
    url: str = "stomp://127.0.0.1:0",
    has_tls: bool = over_tls.IS_ON,
    send_buffer: int = 0,
    users: Users | None = None,
    log: Log | None = None,
    has_history: bool = True,
) -> AsyncIterator[Listener]:
    """Run a broker in this process. Without a data folder it stores nothing on disk. With a `log` the folder is a copy
    of this log.

    Clients that block need threads of their own. With `send_buffer` the broker's sockets take only so many bytes.
    """
    loop = asyncio.get_running_loop()
    history: HistoryWriter | None = None
    store: Store = MemoryStore()
    if data is not None:
        store = embedded = EmbeddedStore(data, log=log)
    if data is not None and has_history:
        history = HistoryWriter(data / "history", on_rotate=lambda: None)
        embedded.sync_history = history.sync
        embedded.follow_history = history.follow
    engine, recovered = recover(store, Policies(), memory_limit=memory_limit, history=history, log=log)
    broker = Broker(engine, store, loop, history=history, users=users, log=log)
    await broker.start(after_clean_stop=recovered.clean_stop)
    address, places = parse_listener_url(url), Places(connections_max, before_login_max)
    tls = ListenerTls(over_tls.server_context()) if has_tls else None

    def make_connection(sock: socket.socket, *arguments: Any, **options: Any) -> ServerConnection:
        if send_buffer:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
        return ServerConnection(sock, *arguments, **options)

    listener = Listener(
        address,
        broker,
        loop,
        identity=recovered.identity,
        server_name="truenext/test",
        places=places,
        tls=tls,
        make_connection=make_connection,
    )
    try:
        yield listener
    finally:
        listener.stop_reading()
        await broker.stop()
        await listener.close()
        broker.close()
        store.close()
        if history is not None:
            history.close()


def port_of(listener: Listener) -> int:
    return int(listener.url.rpartition(":")[2])
