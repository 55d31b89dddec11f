"""A connection of the source or the sink that a test breaks."""

import socket
from contextlib import suppress

from truenext.spark.broker.connection import BrokerConnection


class BreakableConnection(BrokerConnection):
    @property
    def session_id(self) -> str:
        return self._link.session_id

    def write_some(self, share: float) -> None:
        """Write the first part of the pending bytes, and drop the others."""
        data = b"".join(self._link.out_chunks)
        self._link.out_chunks = []
        with suppress(OSError):
            self._socket.sendall(data[: int(len(data) * share)])

    def cut(self) -> None:
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def shut(self) -> None:
        """Close the socket as the system does when the process is gone."""
        self._has_ended.set()
        self.cut()
        self._socket.close()
