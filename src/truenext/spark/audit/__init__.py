"""Proof from the broker's history whether the contract held. One concern per file; `audit.py` chains them."""
