"""Exactly-once processing: sends the units of the outbox, and deletes rows that are not needed any more.

    exactly_once     for workers: check the inbox, borrow a producer, note that a unit was sent
    ├── relay            sends units that their worker did not send, those of dead processes, too
    ├── housekeeping     deletes rows of sent units, many at a time, and rows whose retention has ended
    └── publishing       sends one unit, under its number

A producer has one unit under way: SQL's COMMIT stores the unit and uses the producer's next number. After an answer of
the broker the unit is deleted. Without one the producer is in doubt: it is claimed again under a lock, and its units
are sent again under their numbers. A producer in use by this process is not claimed.

If the broker lacks numbers before that of a unit, they are resolved as rolled back; if it lacks too many, the unit gets
a new number. A unit that is too large for the broker is split: its number is resolved first, then its parts become
units without a number.

Source: docs/stages-database.md; decision 67; every rule has a planted fault in tests/stages/outbox/protocol/rules.py
"""
