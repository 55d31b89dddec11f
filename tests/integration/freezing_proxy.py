"""Proxy between clients and a broker that freezes at any byte, in either direction, and goes on later."""

import contextlib
import queue
import socket
import threading

from tests.listening_proxy import ListeningProxy, shut_down

ENDLESS = 1 << 60


class Way:
    """Direction of a connection: a number of bytes pass, and then none until it is unfrozen."""

    def __init__(self, source: socket.socket, target: socket.socket, passed_bytes: int) -> None:
        self._source = source
        self._target = target
        self._passed_bytes = passed_bytes
        self._changed = threading.Condition()
        self.is_frozen = passed_bytes == 0
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def freeze(self) -> None:
        with self._changed:
            self._passed_bytes = 0
            self.is_frozen = True

    def unfreeze(self) -> None:
        with self._changed:
            self._passed_bytes = ENDLESS
            self.is_frozen = False
            self._changed.notify_all()

    def join(self) -> None:
        self._thread.join()

    def _run(self) -> None:
        with contextlib.suppress(OSError):
            while data := self._source.recv(65536):
                self._forward(data)
        with self._changed:
            # That it has ended is news too.
            self._changed.wait_for(lambda: self._passed_bytes > 0)
        with contextlib.suppress(OSError):
            self._target.shutdown(socket.SHUT_WR)

    def _forward(self, data: bytes) -> None:
        while data:
            with self._changed:
                self._changed.wait_for(lambda: self._passed_bytes > 0)
                part = data[: self._passed_bytes]
                self._passed_bytes -= len(part)
                self.is_frozen = self._passed_bytes == 0
            self._target.sendall(part)
            data = data[len(part) :]


class Link:
    """Connection through the proxy."""

    def __init__(self, client: socket.socket, broker: socket.socket, up: int, down: int) -> None:
        self._sockets = (client, broker)
        self.up = Way(client, broker, up)
        """Direction to the broker."""
        self.down = Way(broker, client, down)

    @property
    def is_frozen(self) -> bool:
        return self.up.is_frozen or self.down.is_frozen

    def freeze(self) -> None:
        self.up.freeze()
        self.down.freeze()

    def unfreeze(self) -> None:
        self.up.unfreeze()
        self.down.unfreeze()

    def close(self) -> None:
        """Close both sides; frozen bytes are lost."""
        for end in self._sockets:
            shut_down(end)
        self.unfreeze()
        self.up.join()
        self.down.join()
        for end in self._sockets:
            end.close()


class FreezingProxy(ListeningProxy):
    """Proxy that listens on `port`, for one broker."""

    def __init__(self, broker_port: int) -> None:
        super().__init__()
        self._broker_port = broker_port
        self._next = (ENDLESS, ENDLESS)
        self._links: queue.SimpleQueue[Link] = queue.SimpleQueue()
        self._all: list[Link] = []

    def expect(self, up: int = ENDLESS, down: int = ENDLESS) -> None:
        """Let the next connection freeze after these numbers of bytes."""
        self._next = (up, down)

    def newest(self) -> Link:
        """Return the link of the client that connected last."""
        link = self._links.get(timeout=20)
        self._all.append(link)
        return link

    def close_links(self) -> None:
        for link in self._all:
            link.close()
        self._all.clear()

    def _connect(self, client: socket.socket) -> None:
        broker = socket.create_connection(("127.0.0.1", self._broker_port))
        for end in (client, broker):
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._links.put(Link(client, broker, *self._next))

    def _end_connections(self) -> None:
        # Links that no test has asked for, too.
        while not self._links.empty():
            self._all.append(self._links.get())
        self.close_links()
