"""Addresses of the console's pages. Names of queues, traces and the like are parameters of an address, never a part of
its path."""

from urllib.parse import urlencode

from truenext.model.dead_letters import GroupKey


def address(path: str, **parameters: object) -> str:
    """Return a path with parameters. Parameters that are None or "" are left out; a list is repeated.

    >>> address("/queue", name="a/../b&c", after=None, sequence=[1, 2])
    '/queue?name=a%2F..%2Fb%26c&sequence=1&sequence=2'
    """
    given = {name: value for name, value in parameters.items() if value not in (None, "", [])}
    return f"{path}?{urlencode(given, doseq=True)}" if given else path


def group_address(path: str, group: GroupKey, **parameters: object) -> str:
    """Return a path with parameters, and with a group of dead letters. The group's parts are there even if empty.

    >>> group_address("/action", GroupKey("orders", "expired", ""), verb="purge")
    '/action?verb=purge&origin=orders&reason=expired&cause='
    """
    return f"{address(path, **parameters)}&{urlencode(group._asdict())}"


def queue_link(name: str) -> str:
    return address("/queue", name=name)


def message_link(queue: str, priority: int, sequence: int) -> str:
    return address("/message", queue=queue, priority=priority, sequence=sequence)


def flow_link(trace: str) -> str:
    return address("/flow", trace=trace)
