"""Audit: checks from the broker's history whether the contract held. Each file checks one subject; `audit.py` joins
them."""
