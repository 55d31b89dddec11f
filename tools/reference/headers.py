"""Page of the destinations and headers, docs/reference/headers.md, from header_docs.py and wire/stomp/headers.py."""

from collections.abc import Iterator, Mapping

from tools.reference.header_docs import BROKER_FRAME_HEADERS, CLIENT_HEADERS, DESTINATIONS, HeaderDoc
from tools.reference.markdown import code, joined, table, wrapped
from truenext.wire.stomp.headers import (
    DURABLE,
    INEFFECTIVE_HEADERS,
    OPTIONS,
    SUBSCRIBE_RULES,
    HeaderValueRule,
    SubscribeTarget,
)

_HEAD = """\
# Reference of destinations and headers

Look up each destination and each header here that the broker understands, accepts without effect or refuses.
[protocol.md](../protocol.md) describes how frames work together, and has the selectors and the codes of errors.
[contract.md](../contract.md) has the promises, [limits.md](limits.md) all limits.

A header of another name has no effect. On a SEND it is yours, and comes with the MESSAGE, also if it begins with
`truenext-`: `truenext-tll` is not refused, but the log warns of such a header, once for each user. On a frame other
than SEND the broker refuses a header that begins with `truenext-` and that the frame does not have. Two headers that
mean the same and conflict are refused, too. Numbers are digits without a sign; `true` and `false` may have capitals.

This page is made from the code: `make reference`.
"""
_ANY = "any value"
_UNDERSTOOD = {DURABLE: (SubscribeTarget.TOPIC, SubscribeTarget.DURABLE), ("exclusive",): (SubscribeTarget.QUEUE,)}
"""Targets of headers on SUBSCRIBE that have an effect, which another table describes."""
_NONE = "none"


def page() -> str:
    return joined(_parts())


def _parts() -> Iterator[str]:
    yield _HEAD
    yield "## Destinations"
    yield table(
        ("address", "for", "is"), [(_names(each.addresses), each.frames, each.meaning) for each in DESTINATIONS]
    )
    yield wrapped(
        "No name has a `?`. In a SUBSCRIBE to a queue or topic, options of ActiveMQ may follow it, percent-encoded, "
        "with `&` between them: `/queue/NAME?consumer.prefetchSize=10&consumer.priority=7`. Their names begin with "
        "`consumer.`, and are among the headers of SUBSCRIBE below. As headers these names are yours."
    )
    for frame, headers in CLIENT_HEADERS.items():
        yield f"## {frame}"
        yield _table(headers, "value and default")
        if frame == "SUBSCRIBE":
            yield from _rules()
        if frame in INEFFECTIVE_HEADERS:
            yield from _ineffective(frame)
    for frame, headers in BROKER_FRAME_HEADERS.items():
        yield f"## {frame}"
        yield _table(headers, "value")
        if frame == "MESSAGE":
            yield "A MESSAGE also has all other headers of its SEND, but for those that concern the SEND alone."


def _table(headers: tuple[HeaderDoc, ...], values: str) -> str:
    return table(("header", values, "means"), [(_names(each.names), each.values, each.meaning) for each in headers])


def _names(names: tuple[str, ...]) -> str:
    return ", ".join(map(code, names))


def _rules() -> Iterator[str]:
    """Yield tables of the headers on SUBSCRIBE that have no effect or are refused."""
    named: list[tuple[list[str], Mapping[SubscribeTarget, HeaderValueRule]]] = []
    for name, rules in SUBSCRIBE_RULES.items():
        for names, others in named:
            if others == rules:
                names.append(name)
                break
        else:
            named.append(([name], rules))
    accepted = [each for each in named if any(rule.accepted is None or rule.accepted for rule in each[1].values())]
    yield "### Headers of other brokers on SUBSCRIBE"
    yield wrapped(
        "These headers have no effect if they have one of the values here, which request the normal behaviour. The "
        "broker refuses them with another value. A topic is durable with `durable:true` or a name of the subscription."
    )
    columns = [target.value for target in SubscribeTarget]
    yield table(("header", *columns, "else"), [_accepted_row(tuple(names), rules) for names, rules in accepted])
    yield "The broker refuses these with any value:"
    yield table(
        ("header", "instead"),
        [(_names(tuple(names)), _advice(rules)[0]) for names, rules in named if (names, rules) not in accepted],
    )
    unknown = (
        set(OPTIONS) - SUBSCRIBE_RULES.keys() - {name for each in CLIENT_HEADERS["SUBSCRIBE"] for name in each.names}
    )
    if unknown:
        raise ValueError(f"header_docs.py has no text of {', '.join(sorted(unknown))}")


def _ineffective(frame: str) -> Iterator[str]:
    """Yield a table of the headers on a frame that have an effect only in other brokers."""
    yield f"### Headers of other brokers on {frame} without effect"
    yield wrapped(
        "Other brokers or their clients give these headers an effect; here they have none. The broker accepts the "
        "frame, and logs the warning `a header of another broker has no effect here`: once for each header and user, "
        "or, without users, once for each header until the broker ends."
    )
    named: dict[str, list[str]] = {}
    for name, instead in INEFFECTIVE_HEADERS[frame].items():
        named.setdefault(instead, []).append(name)
    yield table(("header", "instead"), [(_names(tuple(names)), instead) for instead, names in named.items()])


def _accepted_row(names: tuple[str, ...], rules: Mapping[SubscribeTarget, HeaderValueRule]) -> tuple[str, ...]:
    cells = []
    for target, rule in rules.items():
        if target in _UNDERSTOOD.get(names, ()):
            cells.append("see above")
        else:
            cells.append(_ANY if rule.accepted is None else _names(tuple(sorted(rule.accepted))) or _NONE)
    return _names(names), *cells, ". ".join(_advice(rules)) or "never refused"


def _advice(rules: Mapping[SubscribeTarget, HeaderValueRule]) -> list[str]:
    """Return the reasons for refusing a header, with their targets if there are several reasons."""
    reasons: dict[str, list[str]] = {}
    for target, rule in rules.items():
        if rule.why:
            reasons.setdefault(rule.why, []).append(target.value)
    if len(reasons) == 1:
        return list(reasons)
    return [f"For {' and '.join(targets)}: {why}" for why, targets in reasons.items()]
