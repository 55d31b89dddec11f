"""`truenext stages`: run a service of stages, look at it, and see what a change of it breaks."""
