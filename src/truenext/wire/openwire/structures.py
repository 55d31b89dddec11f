"""Structures of OpenWire 12: commands, messages, ids and destinations.

Each class is the table of its wire format: the fields of a frame come in the order of the class, and the annotation of
a field says how it is encoded (fields.py):

    bool                     boolean
    Byte, Int, Long          signed number
    str | None               string
    bytes | None             byte string
    Throwable | None         class name and message of a Java exception
    Array                    any number of structures
    another class | None     nested structure: boolean, type number, fields

A structure that fails these types is refused. All fields have defaults, so that the broker names only what it sets.
"""

from typing import Annotated, ClassVar

import msgspec

Byte = Annotated[int, 1]
Int = Annotated[int, 4]
Long = Annotated[int, 8]


class Structure(msgspec.Struct, gc=False, frozen=True):
    """Value with a type number. No value refers to one that could refer back to it."""

    TYPE: ClassVar[int] = 0


Array = tuple[Structure | None, ...]


class Throwable(msgspec.Struct, gc=False, frozen=True):
    """Java exception, without its stack trace."""

    class_name: str | None = None
    message: str | None = None


# ---- Ids and destinations ----


class BrokerId(Structure, gc=False, frozen=True):
    TYPE: ClassVar[int] = 124
    value: str | None = None


class ConnectionId(Structure, gc=False, frozen=True):
    TYPE: ClassVar[int] = 120
    value: str | None = None


class SessionId(Structure, gc=False, frozen=True):
    TYPE: ClassVar[int] = 121
    connection_id: str | None = None
    value: Long = 0


class ConsumerId(Structure, gc=False, frozen=True):
    TYPE: ClassVar[int] = 122
    connection_id: str | None = None
    session_id: Long = 0
    value: Long = 0


class ProducerId(Structure, gc=False, frozen=True):
    TYPE: ClassVar[int] = 123
    connection_id: str | None = None
    value: Long = 0
    session_id: Long = 0


class MessageId(Structure, gc=False, frozen=True):
    TYPE: ClassVar[int] = 110
    text_view: str | None = None
    """Id of another provider's message; None if producer and number are the id."""
    producer_id: ProducerId | None = None
    producer_sequence_id: Long = 0
    broker_sequence_id: Long = 0
    """Sequence of the message in this broker."""


class LocalTransactionId(Structure, gc=False, frozen=True):
    TYPE: ClassVar[int] = 111
    value: Long = 0
    connection_id: ConnectionId | None = None


class XATransactionId(Structure, gc=False, frozen=True):
    TYPE: ClassVar[int] = 112
    format_id: Int = 0
    global_transaction_id: bytes | None = None
    branch_qualifier: bytes | None = None


TransactionId = LocalTransactionId | XATransactionId


class PhysicalDestination(Structure, gc=False, frozen=True):
    """Destination as OpenWire names it. A name with commas is composite."""

    name: str | None = None


class QueueName(PhysicalDestination, gc=False, frozen=True):
    TYPE: ClassVar[int] = 100


class TopicName(PhysicalDestination, gc=False, frozen=True):
    TYPE: ClassVar[int] = 101


class TemporaryQueueName(PhysicalDestination, gc=False, frozen=True):
    TYPE: ClassVar[int] = 102


class TemporaryTopicName(PhysicalDestination, gc=False, frozen=True):
    TYPE: ClassVar[int] = 103


# ---- Commands ----


class WireFormatInfo(Structure, gc=False, frozen=True):
    """First frame of either side. It has no command id."""

    TYPE: ClassVar[int] = 1
    version: Int = 0
    properties: bytes | None = None
    """Encoded map."""


class WireCommand(Structure, gc=False, frozen=True):
    """Structure that is a frame of its own."""

    command_id: Int = 0
    """Number that the sender gives the command."""
    response_required: bool = False


class BrokerInfo(WireCommand, gc=False, frozen=True):
    TYPE: ClassVar[int] = 2
    broker_id: BrokerId | None = None
    broker_url: str | None = None
    peer_broker_infos: Array = ()
    broker_name: str | None = None
    is_slave_broker: bool = False
    is_master_broker: bool = False
    is_fault_tolerant: bool = False
    """True switches the client's optimizeAcknowledge off."""
    is_duplex: bool = False
    is_network_connection: bool = False
    connection_id: Long = 0
    broker_upload_url: str | None = None
    network_properties: str | None = None


class ConnectionInfo(WireCommand, gc=False, frozen=True):
    TYPE: ClassVar[int] = 3
    connection_id: ConnectionId | None = None
    client_id: str | None = None
    password: str | None = None
    user_name: str | None = None
    broker_path: Array = ()
    is_broker_master_connector: bool = False
    is_manageable: bool = False
    is_client_master: bool = False
    is_fault_tolerant: bool = False
    is_failover_reconnect: bool = False
    client_ip: str | None = None


class SessionInfo(WireCommand, gc=False, frozen=True):
    TYPE: ClassVar[int] = 4
    session_id: SessionId | None = None


class ConsumerInfo(WireCommand, gc=False, frozen=True):
    TYPE: ClassVar[int] = 5
    consumer_id: ConsumerId | None = None
    is_browser: bool = False
    destination: PhysicalDestination | None = None
    prefetch_size: Int = 0
    maximum_pending_message_limit: Int = 0
    is_dispatch_async: bool = False
    selector: str | None = None
    client_id: str | None = None
    subscription_name: str | None = None
    is_no_local: bool = False
    is_exclusive: bool = False
    is_retroactive: bool = False
    priority: Byte = 0
    broker_path: Array = ()
    additional_predicate: Structure | None = None
    is_network_subscription: bool = False
    is_optimized_acknowledge: bool = False
    is_no_range_acks: bool = False
    network_consumer_path: Array = ()


class ProducerInfo(WireCommand, gc=False, frozen=True):
    TYPE: ClassVar[int] = 6
    producer_id: ProducerId | None = None
    destination: PhysicalDestination | None = None
    """None for an anonymous producer."""
    broker_path: Array = ()
    is_dispatch_async: bool = False
    window_size: Int = 0


class TransactionInfo(WireCommand, gc=False, frozen=True):
    TYPE: ClassVar[int] = 7
    connection_id: ConnectionId | None = None
    transaction_id: TransactionId | None = None
    operation: Byte = 0
    """Number of an operation (transactions.py)."""


class DestinationInfo(WireCommand, gc=False, frozen=True):
    TYPE: ClassVar[int] = 8
    connection_id: ConnectionId | None = None
    destination: PhysicalDestination | None = None
    operation: Byte = 0
    """0 adds the destination, 1 removes it."""
    timeout: Long = 0
    broker_path: Array = ()


class RemoveSubscriptionInfo(WireCommand, gc=False, frozen=True):
    TYPE: ClassVar[int] = 9
    connection_id: ConnectionId | None = None
    subscription_name: str | None = None
    client_id: str | None = None


class KeepAliveInfo(WireCommand, gc=False, frozen=True):
    TYPE: ClassVar[int] = 10


class ShutdownInfo(WireCommand, gc=False, frozen=True):
    TYPE: ClassVar[int] = 11


class RemoveInfo(WireCommand, gc=False, frozen=True):
    TYPE: ClassVar[int] = 12
    object_id: ConnectionId | SessionId | ConsumerId | ProducerId | None = None
    last_delivered_sequence_id: Long = 0


class ControlCommand(WireCommand, gc=False, frozen=True):
    TYPE: ClassVar[int] = 14
    command: str | None = None


class FlushCommand(WireCommand, gc=False, frozen=True):
    TYPE: ClassVar[int] = 15


class ConnectionErrorInfo(WireCommand, gc=False, frozen=True):
    """Error that belongs to no request; the connection stays open."""

    TYPE: ClassVar[int] = 16
    exception: Throwable | None = None
    connection_id: ConnectionId | None = None


class ConsumerControl(WireCommand, gc=False, frozen=True):
    TYPE: ClassVar[int] = 17
    destination: PhysicalDestination | None = None
    is_close: bool = False
    consumer_id: ConsumerId | None = None
    prefetch: Int = 0
    is_flush: bool = False
    is_start: bool = False
    is_stop: bool = False


class ConnectionControl(WireCommand, gc=False, frozen=True):
    TYPE: ClassVar[int] = 18
    is_close: bool = False
    is_exit: bool = False
    is_fault_tolerant: bool = False
    is_resume: bool = False
    is_suspend: bool = False
    connected_brokers: str | None = None
    reconnect_to: str | None = None
    is_rebalance_connection: bool = False
    token: bytes | None = None


class ProducerAck(WireCommand, gc=False, frozen=True):
    TYPE: ClassVar[int] = 19
    producer_id: ProducerId | None = None
    size: Int = 0


class MessagePull(WireCommand, gc=False, frozen=True):
    TYPE: ClassVar[int] = 20
    consumer_id: ConsumerId | None = None
    destination: PhysicalDestination | None = None
    timeout: Long = 0
    """Milliseconds to wait for a message; 0 waits without end, -1 does not wait."""
    correlation_id: str | None = None
    message_id: MessageId | None = None


class JmsMessage(WireCommand, gc=False, frozen=True):
    """Message with all its fields; codec.py reads those of producers faster, as a `ProducedMessage`."""

    TYPE: ClassVar[int] = 23
    producer_id: ProducerId | None = None
    destination: PhysicalDestination | None = None
    transaction_id: TransactionId | None = None
    original_destination: PhysicalDestination | None = None
    message_id: MessageId | None = None
    original_transaction_id: TransactionId | None = None
    group_id: str | None = None
    group_sequence: Int = 0
    correlation_id: str | None = None
    is_persistent: bool = False
    expiration: Long = 0
    priority: Byte = 0
    reply_to: PhysicalDestination | None = None
    timestamp: Long = 0
    jms_type: str | None = None
    content: bytes | None = None
    marshalled_properties: bytes | None = None
    """Encoded map."""
    data_structure: Structure | None = None
    """Command that an advisory tells."""
    target_consumer_id: ConsumerId | None = None
    is_compressed: bool = False
    redelivery_counter: Int = 0
    broker_path: Array = ()
    arrival: Long = 0
    user_id: str | None = None
    is_received_by_bridge: bool = False
    is_droppable: bool = False
    cluster: Array = ()
    broker_in_time: Long = 0
    broker_out_time: Long = 0
    is_first_for_consumer: bool = False


class BytesMessage(JmsMessage, gc=False, frozen=True):
    TYPE: ClassVar[int] = 24


class MapMessage(JmsMessage, gc=False, frozen=True):
    TYPE: ClassVar[int] = 25


class ObjectMessage(JmsMessage, gc=False, frozen=True):
    TYPE: ClassVar[int] = 26


class StreamMessage(JmsMessage, gc=False, frozen=True):
    TYPE: ClassVar[int] = 27


class TextMessage(JmsMessage, gc=False, frozen=True):
    TYPE: ClassVar[int] = 28


class BlobMessage(JmsMessage, gc=False, frozen=True):
    TYPE: ClassVar[int] = 29
    remote_blob_url: str | None = None
    mime_type: str | None = None
    is_deleted_by_broker: bool = False


class MessageDispatch(WireCommand, gc=False, frozen=True):
    TYPE: ClassVar[int] = 21
    consumer_id: ConsumerId | None = None
    destination: PhysicalDestination | None = None
    message: JmsMessage | None = None
    """None ends a browse or a pull."""
    redelivery_counter: Int = 0


class MessageAck(WireCommand, gc=False, frozen=True):
    TYPE: ClassVar[int] = 22
    destination: PhysicalDestination | None = None
    transaction_id: TransactionId | None = None
    consumer_id: ConsumerId | None = None
    ack_type: Byte = 0
    """Number of a type (consumers.py)."""
    first_message_id: MessageId | None = None
    last_message_id: MessageId | None = None
    message_count: Int = 0
    poison_cause: Throwable | None = None


class Response(WireCommand, gc=False, frozen=True):
    TYPE: ClassVar[int] = 30
    correlation_id: Int = 0
    """`command_id` of the request."""


class ExceptionResponse(Response, gc=False, frozen=True):
    TYPE: ClassVar[int] = 31
    exception: Throwable | None = None


class DataArrayResponse(Response, gc=False, frozen=True):
    TYPE: ClassVar[int] = 33
    data: Array = ()


def structure_classes(base: type[Structure] = Structure) -> dict[int, type[Structure]]:
    """Return all classes of structures that a frame can have, by type number."""
    classes: dict[int, type[Structure]] = {}
    for one in base.__subclasses__():
        if one.TYPE:
            classes[one.TYPE] = one
        classes |= structure_classes(one)
    return classes
