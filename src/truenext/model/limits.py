"""How much of anything one peer may make the broker hold.

Every limit is checked before memory is taken for what it limits. Sizes are in bytes unless the name says
otherwise. What waits in queues may be as much as the disk takes; how much of it is in memory is said by policy.py
and the command line.
"""

LOGIN_BYTES_MAX = 8 * 1024
"""Bytes a peer may send before its CONNECT is complete: a stranger gets no more memory than a login needs."""

LOGIN_SECONDS_MAX = 5.0
"""Seconds from accept to a complete CONNECT: an idle stranger must not hold a connection."""

HEADERS_MAX = 128
"""Headers in one frame: each costs a dictionary entry, whatever its length."""

HEADER_BYTES_MAX = 64 * 1024
"""All header lines of one frame together, the command included; also all that may arrive without a blank line."""

MESSAGE_HEADERS_MAX = 2 * HEADERS_MAX
MESSAGE_HEADER_BYTES_MAX = 2 * HEADER_BYTES_MAX
"""The same of a frame that a client takes from its broker, which says more of a message than its sender: of a dead
letter that has failed four causes, which are twice as long at the most when they are escaped."""

BODY_BYTES_MAX = 16 * 1024 * 1024
"""One message's body: the largest block that one frame may make the broker allocate."""

ANSWER_BYTES_MAX = 256 * 1024 * 1024
"""The same of what a client takes from its broker, which may tell of all its queues in one answer: 120 bytes each."""

CONNECTIONS_MAX = 1000
"""Connections at once, of one listener; fewer if the system lets the broker open fewer files (cli/files.py)."""

CONTROL_ONLY_CONNECTIONS_MAX = 10
"""Connections beyond these that may only ask the broker, so that whoever runs it can."""

CONTROL_ONLY_IDLE_S = 5.0
"""Seconds for which one of them may ask nothing."""

SUBSCRIPTIONS_MAX = 1000
"""Subscriptions of one connection, and temporary queues that belong to it."""

NAME_LENGTH_MAX = 255
"""Characters in what a client calls its subscriptions, transactions, receipts and producers: the broker keeps them."""

DESTINATION_LENGTH_MAX = 255
"""Characters in a destination's name: names are kept in memory and in the store for good."""

DURABLE_LENGTH_MAX = DESTINATION_LENGTH_MAX - len("DLQ.subscription..")
"""Characters in a client-id and the name of its durable subscription together: with these around them they name its
dead-letter queue."""

SELECTOR_LENGTH_MAX = 4096
"""Characters in a selector: it is compiled at once, in about 5 us for each, and tested against all that waits."""

SELECTOR_DEPTH_MAX = 32
"""Parentheses of a selector in one another: each is several calls in one another when it is tested."""

SELECTOR_SCAN_MAX = 256
"""Characters of a selector in those pieces of its LIKE patterns that hold a _ and stand between two %: only there the
test takes as long as the value times the pattern."""

SELECTOR_CACHE_BYTES = 2 * 1024 * 1024
"""Bytes of compiled selectors that are kept for whoever may name them again, though nobody uses them."""

COMPOSITE_MAX = 100
"""Destinations that one message may be sent to at once."""

CONTENT_BYTES_MIN = 1024
"""Bytes of header and body from which on several queues share what is stored. Below, to count references costs more
time than to write the bytes."""

SPARK_SURPLUS_BYTES_MAX = 16 * 1024
"""Bytes that one transaction may send to queues of Spark beyond what it frees, where there is no room on the disk: the
last bundle of a batch may be empty, and frees nothing."""

TRANSACTIONS_MAX = 64
"""Open transactions of one connection, if its setting says nothing else: a session normally has one, a pool of workers
a few."""

TRANSACTIONS_CEILING = 10_000
"""The most that it may say: each is some 500 bytes, whose memory no other limit counts."""

TRANSACTION_BYTES_MAX = 16 * 1024 * 1024
"""Bytes one connection may hold in open transactions, unless it is one larger message, if its setting says nothing
else: each becomes one batch of the store."""

TRANSACTION_BYTES_CEILING = 64 * 1024 * 1024
"""The most that it may say: a batch is written in one piece, for most of a second, while others wait for theirs."""

TRANSACTION_MESSAGES_MAX = 50_000
"""Sends and acknowledgements in one connection's open transactions: as TRANSACTION_BYTES_MAX, for small messages."""

TRANSACTION_MESSAGES_CEILING = 200_000
"""The most that its setting may say: a COMMIT is one step of about a second, in which nobody else is served."""

PRODUCERS_MAX = 100_000
"""Producers remembered for repeated sends; each is kept for PRODUCER_RETENTION_MS after its last use."""

PRODUCER_RETENTION_MS_MIN = 3600 * 1000
"""The same if they are too many and it had one SEND alone, and no other use."""

PRODUCER_RETENTION_MS = 7 * 24 * 3600 * 1000
"""Milliseconds a producer's last number is remembered after its last use (guarantee L5)."""

DELAY_MS_MAX = 7 * 24 * 3600 * 1000
"""Longest delay in milliseconds that a NACK may ask for: what waits longer belongs into a queue of its own."""

CAUSE_BYTES_MAX = 4096
"""Bytes of UTF-8 in which a consumer may say why it failed with a message: escaped, no more than most clients take in
one header line (10 KiB)."""

RESOLVED_MAX = 100
"""COMMITs of one producer that are known to have been resolved as rolled back, the highest."""

RESOLVED_TOTAL_MAX = 500_000
"""The same of all producers together, about 25 MiB: beyond that no more COMMITs are resolved."""

PRODUCER_NUMBER_MAX = 2**63 - 1
"""Largest number of a repeated send: it is stored in eight bytes."""

WINDOW_DEFAULT = 1000
"""Messages a consumer may hold that names no window and acknowledges cumulatively, and the most that an automatic
window grows to: ActiveMQ's default."""

CONSUMER_PRIORITY_MAX = 127
"""Highest consumer priority, and lowest with a minus: ActiveMQ's."""

WINDOW_MAX = 32_767
"""Largest window a consumer may ask for, in messages; more is refused. One cumulative NACK can give back a whole window
in one step, which must not take long."""

UNSENT_BYTES_MAX = 1024 * 1024
"""Bytes of messages written to a connection that its socket has not taken yet; a window is shut beyond it."""

UNSENT_ANSWER_BYTES_MAX = 4 * 1024 * 1024
"""Bytes waiting for a peer that asks (for receipts) and does not read; beyond it the connection is cut."""

READ_BYTES = 128 * 1024
"""Bytes taken from a socket in one read: large enough to share a pass among many frames, small enough to be fair."""

INCOMPLETE_FRAME_BYTES = 16 * 1024
"""Bytes of a frame that is not complete from which on it counts towards its share of the memory: of CONNECTIONS_MAX
connections less than that is 16 MiB, and most messages are smaller."""

INCOMPLETE_FRAME_SECONDS = 10
"""Seconds after which a client is ended that sends next to nothing of a frame that counts while others wait for room
for theirs: longer than a network is normally silent, and short enough to try again after it."""

INCOMPLETE_FRAME_PROGRESS_BYTES = 1024 * 1024
"""Bytes in that time that are more than next to nothing: the largest frame has room for three minutes at the most."""

GATHERING_BYTES_MAX = 4 * 1024 * 1024
"""Bytes of the batch that gathers while another is made durable, and of the answers that wait for it, roughly; beyond
it no connection is read."""

PENDING_ANSWER_BYTES = 500
"""What an answer that waits for the disk counts towards GATHERING_BYTES_MAX."""

LAZY_COMMIT_SECONDS = 0.025
"""Longest time a batch that nobody waits for gathers before it is written."""

HISTORY_FLUSH_SECONDS = 0.05
"""Longest time in which history of what is durable is not in its file yet."""

INLINE_WRITE_SECONDS_MAX = 0.002
"""Longest time for which the event loop expects to write a batch itself; after a write that took longer the store's
thread has all of them, until one was quicker."""

SMALL_BATCH_BYTES = 64 * 1024
"""Bytes of a batch whose size is not what its write takes time for."""

INLINE_SMALL_WRITE_SECONDS_MAX = 0.0005
"""Average time of small writes, at most; of a disk that is slower the event loop does not wait at all."""

REFUSALS_PER_PASS_MAX = 200
"""Frames of one connection that are refused in one pass; what is behind them is carried out a moment later."""

CAPACITY_CHECK_INTERVAL_S = 0.1
"""Time between two looks at whether those may be read on who wait for room on the disk."""

SEQUENCE_BLOCK = 1 << 20
"""Sequence numbers reserved, durably, at a time."""

SEQUENCE_RESERVE = 1 << 18
"""Sequence numbers that must be left for connections to be read. Should one read use up more, what gets the others
waits until they are reserved."""

HEART_BEAT_MS_MIN = 250
"""Shortest heart-beat interval offered, in milliseconds: a timer per connection must not become a load."""

HEART_BEAT_GRACE_FACTOR = 2.25
"""A peer is given up after this many of its heart-beat intervals without a byte. Promised are 2 to 2.5: neither side's
timers are exact."""

STORE_TRANSACTION_BYTES_MAX = 4 * 1024 * 1024
"""Bytes in one batch of a clean stop: the dirty pages of a write transaction stay in private memory."""

ANSWERS_IN_FLIGHT_BYTES_MAX = 8 * 1024 * 1024
"""Bytes of large answers to questions that may be on their way to clients at once, or one that is larger."""

ANSWER_STALL_SECONDS = 10
"""Seconds after which a client is ended that takes next to nothing of its answer while others wait for theirs."""

ANSWER_SECONDS_MAX = 60
"""The same if it has not taken all of it."""

REPLIES_EXCESS_BYTES_MAX = 24 * 1024 * 1024
"""Bytes by which messages may exceed their part of the memory, or three quarters of that if it is less, before the
connection with the largest reply queue is ended: an answer counts twice while it is on its way."""

BROWSE_MESSAGES_PER_TURN = 250
BROWSE_BYTES_PER_TURN = 256 * 1024
"""Messages that a browser looks at in one turn, and bytes: nobody else is served meanwhile. Read from the store, those
are bytes of records; in memory, of header lines, which selectors look at."""

SCAN_MESSAGES_PER_TURN = 60
"""Messages of one queue compared with selectors in one turn: nobody else is served meanwhile."""

SCAN_PAGE_SIZE = 120
"""Messages read at a time to be compared: twice as many, as half of what that takes is done on another thread."""

SCAN_BYTES = 1024 * 1024
"""Bytes of records read at a time to be compared."""

SCAN_FOUND_MAX = 1000
"""Messages of one lane that a selector wants and nobody has taken yet; then it looks no further until some are."""

GROUP_FOUND_MIN = 10
"""Messages of a group, in one lane, that one selector's consumers may have found before they are taken, however many
groups there are; if they are few it is a fair share of SCAN_FOUND_MAX."""

GROUPS_MAX = 10_000
"""Groups of one queue of which is known whose they are, as far as nothing of them is held: some 300 bytes each."""

GROUPS_MIN = 100
"""The same where queues take all their room."""

KEPT_MAX = 32_767
"""Messages that one request to give back names as kept: a window's worth."""

SECRETS_MAX = 1000
"""Connections that have ended of which the broker still knows secret and number."""

BROWSERS_MAX = 100
"""Browsers of one broker that were not shown all yet: each turn looks for the next one that has room."""

CONFIGURATION_BYTES_MAX = 1024 * 1024
"""Bytes of a configuration file: some ten thousand settings. A running broker reads it in one step."""

MEMORY_LIMIT = 256 * 1024 * 1024
"""Private memory the broker may take, all told: itself, a quarter for messages, the rest for queues."""

MEMORY_LIMIT_MIN = 128 * 1024 * 1024
"""The least that can be asked for: the broker itself takes about half of it."""

BROKER_BYTES = 48 * 1024 * 1024
"""What of MEMORY_LIMIT is neither for messages nor for queues: the interpreter, the journal's index, batches on their
way, pages. When queues have taken all the rest none is made any more, but for what has failed, is moved, or was sent in
a transaction: that must have a place to go."""

UNUSED_QUEUE_SECONDS = 60.0
"""Time after which a queue goes that is empty and unused."""

UNUSED_QUEUE_SECONDS_SHORT = 1.0
"""The same where there is no room for another one."""

JOIN_QUEUES_PER_TURN = 200
"""Queues at which one turn looks for a consumer of a pattern that is to join them."""

UNUSED_QUEUES_CHECKED_MAX = 5000
"""Queues that are looked at in one go, whether they are unused; some 0.3 us each."""

UNUSED_QUEUES_REMOVED_MAX = 500
"""Queues that go in one go, at most: others are served in between."""

DISK_LIMIT_MIN = 1024 * 1024 * 1024
"""The least that can be asked for: up to half of it is the journal, before anything of it moves."""

PAGE_SIZE = 1000
"""Messages read from the store at a time."""

PAGE_SIZE_MAX = 100_000
"""The most that can be asked for: a page is taken in in one step, which must not take long."""

ATTEMPTS_MAX = 1_000_000
"""Most attempts that can be asked for: the store has four bytes for them."""

PAGE_BYTES_SHORT = 64 * 1024
SCHEDULE_MS_MAX = 100 * 365 * 24 * 3600 * 1000
"""Longest delay or period in milliseconds of a scheduled send."""

SCHEDULE_TIME_MAX = 2 * SCHEDULE_MS_MAX
"""Latest time of a scheduled send that names it, in milliseconds since 1970."""

TTL_MS_MAX = SCHEDULE_MS_MAX
"""Longest time in milliseconds that a SEND may give its message to live."""

CRON_LENGTH_MAX = 100
"""Characters in a cron expression."""

DUE_SENDS_PER_READ = 500
"""Scheduled sends that are read at a time, at most, and become messages in one go."""

SHOWN_BODY_BYTES = 1000
"""Bytes of a scheduled send's body that are shown."""

SHOWN_SENDS_PER_PIECE = 100
"""Scheduled sends that are shown in one go."""

SEQUENCE_MAX = 2**63 - 1
"""More are never given out."""

CONTROL_REQUEST_BYTES_MAX = 64 * 1024
"""Bytes of a question to the broker."""

CONTROL_REQUEST_SEQUENCES_MAX = 1000
"""Messages that one may name."""

PIECES_MAX = 100
"""Pieces of bulk work that one connection may wait for."""

BULK_MESSAGES_PER_PIECE = 500
"""Messages moved or removed in one go when somebody asks for that: others are served in between."""

QUEUE_REMOVAL_BYTES = 20
"""What a queue that has gone counts in a batch, roughly."""

PAUSE_BYTES = 20
"""What a queue that is paused or resumed counts in a batch, roughly."""

PAGE_SIZE_SHORT = 16
"""Messages read at a time while memory is short: what is read and not taken at once leaves again."""

PAGE_BYTES = 1024 * 1024
"""Bytes of records read from the store at a time, or one message."""

HISTORY_FILE_BYTES = 16 * 1024 * 1024
"""Bytes of history after which a new file begins: about a million events, which somebody has to hold in memory to turn
them into Parquet."""

HISTORY_BYTES_MAX = 8 * 1024 * 1024 * 1024
"""Bytes of history kept; the oldest files go first."""

HISTORY_DAYS_MAX = 30
"""Days for which history is kept."""
