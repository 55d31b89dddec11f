"""Does the history show that the contract held? One concern a file; `audit.py` chains them."""
