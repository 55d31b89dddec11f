"""Exactly-once processing: sends the units of the outbox, and deletes rows that are no longer needed.

    exactly_once     for workers: check the inbox, borrow a producer, note that a unit was sent
    ├── relay            sends units that their worker did not send, including units of dead processes
    ├── housekeeping     deletes rows of sent units, and rows whose retention has ended
    └── publishing       sends one unit, under its number

A producer sends one unit at a time. SQL's COMMIT stores the unit, with the producer's next number. The unit is deleted
once the broker has answered the COMMIT. If an answer of the broker or the database is missing, the producer is in
doubt. Then the relay claims the producer again under a lock, and sends its units again under their numbers. The relay
claims no producer that a worker of this process is using.

If the broker does not know some numbers before the number of a unit, these unknown numbers are resolved as rolled back.
If there are too many unknown numbers, the unit gets a new number. If a combined unit (several units
sent in one COMMIT) is too large for the broker, its number is resolved. If the outcome is "rolled back", its parts
become units of their own, which get numbers when they are sent.

Source: docs/stages-database.md; decision 67; every rule has a planted fault in tests/stages/outbox/protocol/rules.py
"""
