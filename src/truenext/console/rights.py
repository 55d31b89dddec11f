"""Rights of the user that is logged in, as the broker reports them. They decide which buttons a page has; the broker
itself refuses what a user may not do."""

from __future__ import annotations

from truenext.errors import TruenextError
from truenext.model.control_answers import UserReport
from truenext.model.destination import SPARK_PREFIX, SUBSCRIPTION_PREFIX, DestinationKind, parse_stored_address
from truenext.model.grants import Pattern, Right, User, known_patterns, subscription_topic


class Rights:
    """What a user may do. Without users everything is allowed."""

    def __init__(self, report: UserReport | None) -> None:
        self.name = None if report is None else report.name
        self._user = None if report is None else _user(report)
        self.is_monitor = report is None or report.monitor
        self.is_admin = report is None or report.admin
        self.grants = [] if report is None else _grants(report)
        """Right and pattern of each grant."""

    @staticmethod
    def of_nothing(name: str | None) -> Rights:
        """Return the rights of a user whose grants are not known at the moment; None stands for no users."""
        return Rights(None if name is None else UserReport(name))

    def may(self, right: Right, queue: str) -> bool:
        """Return whether the user has a right on a queue, or on the topic of a durable subscription."""
        if self._user is None:
            return True
        if queue.startswith(SUBSCRIPTION_PREFIX):
            return self._user.may(right, subscription_topic(queue))
        return self._user.may(right, Pattern(False, tuple(queue.split("."))))

    def may_ask(self, right: Right, pattern: Pattern) -> bool:
        """Return whether the user has a right on all that a pattern covers."""
        return self._user is None or self._user.may(right, pattern)

    def may_browse(self, queue: str) -> bool:
        return self.may(Right.BROWSE, queue)

    def may_act(self, queue: str) -> bool:
        """Return whether the user may pause, purge or re-drive a queue in the console: no queue of Spark's queries."""
        return not queue.startswith(SPARK_PREFIX) and self.may(Right.MANAGE, queue)

    def may_unschedule(self, queue: str, to: str) -> bool:
        """Return whether the user may cancel a scheduled send to one queue, or (`queue` "") to the address `to`."""
        if self._user is None:
            return True
        if queue:
            return self.may(Right.MANAGE, queue)
        try:
            destination = parse_stored_address(to)
        except TruenextError:
            return False
        return all(
            self._user.may(Right.MANAGE, Pattern(part.kind is DestinationKind.TOPIC, tuple(part.name.split("."))))
            for part in destination.parts or (destination,)
        )


def _user(report: UserReport) -> User:
    grants = {right: known_patterns(getattr(report, right.value)) for right in Right}
    return User(report.name, grants, report.client_ids, is_monitor=report.monitor, is_admin=report.admin)


def _grants(report: UserReport) -> list[tuple[str, str]]:
    grants = [(right.value, pattern) for right in Right for pattern in getattr(report, right.value)]
    alone = [(name, "") for name, has in (("monitor", report.monitor), ("admin", report.admin)) if has]
    return grants + alone
