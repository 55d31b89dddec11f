"""Effects that happen once: how what the outbox has is sent, by whom, and what is remembered of it.

    once         what a worker says: was this already processed, borrow a number, it was sent
    ├── relay        takes over what nobody sends any more, and sends it
    ├── confirming   has the rows go of what was sent, many at a time
    ├── cleaning     has the rows go that were kept for long enough
    └── sending      one unit, under its number

Source: docs/stages-outbox.md; decision 67
"""
