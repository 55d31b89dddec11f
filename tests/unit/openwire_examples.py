"""Random structures of OpenWire, for tests: as ActiveMQ's own classes could have them."""

from functools import cache
from typing import Annotated, Any, ClassVar, get_args, get_origin, get_type_hints

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from truenext.model.loose_fields import Tag, TypedValue, encode_map, text_value
from truenext.wire.openwire.structures import (
    Array,
    BrokerId,
    BrokerInfo,
    BytesMessage,
    ConnectionId,
    ConsumerId,
    DataArrayResponse,
    DestinationInfo,
    JmsMessage,
    LocalTransactionId,
    MapMessage,
    MessageId,
    ObjectMessage,
    PhysicalDestination,
    ProducerId,
    QueueName,
    StreamMessage,
    Structure,
    TemporaryQueueName,
    TemporaryTopicName,
    TextMessage,
    Throwable,
    TopicName,
    XATransactionId,
    structure_classes,
)


def unhurried(examples: int) -> settings:
    """Settings of a test with so many examples, which may be slow on a busy machine."""
    return settings(max_examples=examples, deadline=None, suppress_health_check=[HealthCheck.too_slow])


TEXTS = st.text(max_size=12) | st.sampled_from(["", "\0", "ä", "😀", "\ud83d", "a\udc00", "ID:host-1:1"])
LONGS = st.integers(-(2**63), 2**63 - 1)
NUMBERS = {1: st.integers(-128, 127), 4: st.integers(-(2**31), 2**31 - 1), 8: LONGS}
BYTES = st.binary(max_size=20)
IDS = st.sampled_from(["ID:host-52371-1700000000000-1:1", "ID:b-1:2", "ä"])
DESTINATIONS: st.SearchStrategy[Structure] = st.builds(
    lambda kind, name: kind(name),
    st.sampled_from([QueueName, TopicName, TemporaryQueueName, TemporaryTopicName]),
    st.text("ab.>*-é", min_size=1, max_size=9),
)
THROWABLES = st.builds(
    Throwable,
    st.sampled_from(["javax.jms.JMSException", "java.lang.SecurityException", "java.lang.RuntimeException"]),
    st.none() | TEXTS,
)
PRODUCERS = st.builds(ProducerId, IDS, LONGS, LONGS)
TRANSACTIONS = st.builds(LocalTransactionId, LONGS, st.builds(ConnectionId, IDS)) | st.builds(
    XATransactionId, NUMBERS[4], BYTES, BYTES
)
MESSAGE_IDS = st.builds(MessageId, st.none() | st.just("ID:other"), PRODUCERS, LONGS, LONGS)
FLOATS = st.floats(width=32, allow_nan=False)
VALUES = st.one_of(
    st.builds(TypedValue, st.just(Tag.BOOLEAN), st.booleans()),
    st.builds(TypedValue, st.just(Tag.BYTE), NUMBERS[1]),
    st.builds(TypedValue, st.just(Tag.SHORT), st.integers(-(2**15), 2**15 - 1)),
    st.builds(TypedValue, st.just(Tag.INTEGER), NUMBERS[4]),
    st.builds(TypedValue, st.just(Tag.LONG), LONGS),
    st.builds(TypedValue, st.just(Tag.DOUBLE), st.floats(allow_nan=False)),
    st.builds(TypedValue, st.just(Tag.FLOAT), FLOATS),
    st.builds(text_value, TEXTS),
)
"""Values of the types that JMS allows for properties."""
LONG_TEXTS = [text_value("x" * 8191), text_value("é" * 9000)]
ALL_VALUES = st.recursive(
    VALUES
    | st.just(TypedValue(Tag.NULL, None))
    | st.builds(TypedValue, st.just(Tag.BYTES), BYTES)
    | st.builds(TypedValue, st.just(Tag.CHARACTER), st.characters(max_codepoint=0xFFFF))
    | st.sampled_from(LONG_TEXTS),
    lambda inner: (
        st.builds(TypedValue, st.just(Tag.LIST), st.lists(inner, max_size=3))
        | st.builds(TypedValue, st.just(Tag.MAP), st.dictionaries(TEXTS, inner, max_size=3))
    ),
    max_leaves=5,
)
PROPERTIES = st.dictionaries(st.text("abcXYZ_1ä", min_size=1, max_size=8), VALUES, max_size=4)


def _field(owner: type[Structure], name: str, annotation: Any) -> st.SearchStrategy[Any]:
    if annotation == Array:
        elements: st.SearchStrategy[Structure] = st.builds(BrokerId, TEXTS)
        if name == "network_consumer_path":
            elements = st.builds(ConsumerId, IDS, LONGS, LONGS)
        elif name == "peer_broker_infos":
            elements = st.builds(BrokerInfo, NUMBERS[4], st.booleans(), broker_name=TEXTS)
        elif owner is DataArrayResponse:
            elements = TRANSACTIONS
        return st.lists(elements, max_size=3).map(tuple)
    if get_origin(annotation) is Annotated:
        if name == "priority" and issubclass(owner, JmsMessage):
            return st.integers(0, 9)
        return NUMBERS[get_args(annotation)[1]]
    if annotation is bool:
        return st.booleans()
    choices = [one for one in get_args(annotation) if one is not type(None)]
    known: dict[Any, st.SearchStrategy[Any]] = {
        str: TEXTS,
        bytes: BYTES,
        Throwable: THROWABLES,
        PhysicalDestination: DESTINATIONS,
        ProducerId: PRODUCERS,
        LocalTransactionId: TRANSACTIONS,
        MessageId: MESSAGE_IDS,
        JmsMessage: st.deferred(lambda: structures(28)),
        Structure: st.builds(DestinationInfo, NUMBERS[4], st.booleans(), st.none(), DESTINATIONS),
    }
    if name == "mime_type":
        # Java has a default.
        return TEXTS
    if name == "additional_predicate":
        return st.none()
    if name == "properties":
        return PROPERTIES.map(encode_map)
    if name == "marshalled_properties":
        return st.none() | PROPERTIES.map(encode_map)
    if name in ("global_transaction_id", "branch_qualifier"):
        return BYTES
    if name == "name":
        return st.text("ab.>*-é", min_size=1, max_size=9)
    found = [known[one] if one in known else structures(one.TYPE) for one in choices if one is not XATransactionId]
    return st.none() | st.one_of(found)


@cache
def structures(number: int) -> st.SearchStrategy[Any]:
    """Strategy of random structures with this type number."""
    make = structure_classes()[number]
    hints = get_type_hints(make, include_extras=True)
    fields = {name: hints[name] for name in make.__struct_fields__ if get_origin(hints[name]) is not ClassVar}
    return st.builds(make, **{name: _field(make, name, hint) for name, hint in fields.items()})


COMMANDS = [number for number in structure_classes() if number < 100]
"""Type numbers of frames."""
MESSAGE_CLASSES: list[type[JmsMessage]] = [
    JmsMessage,
    BytesMessage,
    MapMessage,
    ObjectMessage,
    StreamMessage,
    TextMessage,
]


@st.composite
def produced(draw: st.DrawFn) -> JmsMessage:
    """Message as a JMS client could send it: often one that only has the usual fields."""
    make: type[JmsMessage] = draw(st.sampled_from(MESSAGE_CLASSES))
    producer = draw(PRODUCERS)
    usual: dict[str, Any] = {
        "command_id": draw(NUMBERS[4]),
        "response_required": draw(st.booleans()),
        "producer_id": producer,
        "destination": draw(DESTINATIONS),
        "message_id": MessageId(None, producer, draw(LONGS), draw(st.sampled_from([0, 7]))),
        "is_persistent": draw(st.booleans()),
        "expiration": draw(st.sampled_from([0, -5, 1_800_000_000_000])),
        "priority": draw(st.integers(0, 9)),
        "timestamp": draw(LONGS),
    }
    plain = st.none() | st.sampled_from(["", "g", "ID:1", "é😀"])
    optional: dict[str, st.SearchStrategy[Any]] = {
        "transaction_id": TRANSACTIONS,
        "group_id": plain,
        "group_sequence": NUMBERS[4],
        "correlation_id": plain,
        "reply_to": DESTINATIONS,
        "jms_type": plain,
        "content": BYTES,
        "marshalled_properties": PROPERTIES.map(encode_map),
        "is_compressed": st.booleans(),
    }
    rare: dict[str, st.SearchStrategy[Any]] = {
        "original_destination": DESTINATIONS,
        "original_transaction_id": TRANSACTIONS,
        "message_id": MESSAGE_IDS,
        "is_droppable": st.booleans(),
        "arrival": LONGS,
        "user_id": TEXTS,
        "redelivery_counter": NUMBERS[4],
        "priority": NUMBERS[1],
    }
    for name in draw(st.sets(st.sampled_from(sorted(optional)))):
        usual[name] = draw(optional[name])
    for name in draw(st.just(set()) | st.sets(st.sampled_from(sorted(rare)), max_size=2)):
        usual[name] = draw(rare[name])
    return make(**usual)
