"""`truenext stages`: run a service of stages, describe it, and check a change of it."""
