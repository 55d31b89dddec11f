"""Which headers are between one client and the broker alone, and do not go on with the message?"""

SCHEDULE_HEADERS = frozenset(
    {"AMQ_SCHEDULED_DELAY", "AMQ_SCHEDULED_PERIOD", "AMQ_SCHEDULED_REPEAT", "AMQ_SCHEDULED_CRON"}
)
FIRST_OF_GROUP = "JMSXGroupFirstForConsumer"
HOP_HEADERS = SCHEDULE_HEADERS | frozenset(
    {
        # What concerns the SEND alone, and what only the broker may say of a message.
        "receipt",
        "transaction",
        "browser",
        "truenext-producer",
        "truenext-number",
        "truenext-ttl",
        "truenext-gapless",
        "message-id",
        "subscription",
        "ack",
        "redelivered",
        "timestamp",
        "truenext-sequence",
        "truenext-deliveries",
        "truenext-attempts",
        "truenext-first-cause",
        "truenext-last-cause",
        FIRST_OF_GROUP,
    }
)
