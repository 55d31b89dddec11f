"""Exactly-once processing: sends the units of the outbox, and deletes rows that are not needed any more.

    exactly_once     for workers: check the inbox, borrow a producer, note that a unit was sent
    ├── relay            sends units that their worker did not send, those of dead processes, too
    ├── housekeeping     deletes rows of sent units, many at a time, and rows whose retention has ended
    └── publishing       sends one unit, under its number

Source: docs/stages-database.md; decision 67
"""
