"""Events of stages joined with the broker's history: contradictions between the two, and the course of flows."""
