"""Effects that happen once: how what the outbox has is sent, by whom, and what is remembered of it.

    exactly_once     what a worker says: was this already processed, borrow a number, it was sent
    ├── relay            takes over what nobody sends any more, and sends it
    ├── housekeeping     has the rows go of what was sent, many at a time, and those that were kept for long enough
    └── publishing       one unit, under its number

Source: docs/stages-outbox.md; decision 67
"""
