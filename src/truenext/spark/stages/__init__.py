"""Events of stages joined to the broker's history: contradictions between them, and the course of flows."""
