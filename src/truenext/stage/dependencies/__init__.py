"""Dependencies of a stage: connections, clients, and other values that factories make for it."""
