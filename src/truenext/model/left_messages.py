"""Reasons why bulk work leaves messages where they are, as commands and the console tell them."""

HELD = "held by consumers, or still being committed"

LEFT_TEXTS = {
    "redrive": "held by consumers, still being committed, or with an unknown original queue (`truenext move` moves "
    "those to a queue)",
    "move": HELD,
    "purge": HELD,
    "unschedule": "their records are damaged",
}
"""Reasons why messages or scheduled sends are left, by the verb of the control request. Messages that failed in a
durable subscription which has ended are counted by themselves."""
