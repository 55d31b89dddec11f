"""Connection ids: to which user the id of a JMS client's lost connection belongs.

A client on `failover:` connects again with the id of the connection that it has lost. This id is no secret: each
message of the client has it. So the broker keeps it for the user of the lost connection.
"""

from collections.abc import Container

from truenext.model.limits import LOST_IDS_MAX


class ConnectionIds:
    def __init__(self) -> None:
        self._owners: dict[str, str] = {}
        """User of each id."""
        self._by_user: dict[str, dict[str, None]] = {}
        """Ids of each user, the one that was lost longest ago first."""

    def keep(self, connection_id: str, user: str) -> None:
        """Keep the id of a lost connection for its user."""
        ids = self._by_user.setdefault(user, {})
        ids.pop(connection_id, None)
        ids[connection_id] = None
        self._owners[connection_id] = user
        if len(ids) > LOST_IDS_MAX:
            oldest = next(iter(ids))
            del ids[oldest], self._owners[oldest]

    def owner_of(self, connection_id: str) -> str:
        """Return the user for which an id is kept; "" if there is none."""
        return self._owners.get(connection_id, "")

    def keep_users(self, names: Container[str]) -> None:
        """Forget the ids of all users but these."""
        for user in [user for user in self._by_user if user not in names]:
            for connection_id in self._by_user.pop(user):
                del self._owners[connection_id]
