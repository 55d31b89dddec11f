"""Core of stages: their definitions, messages and flows, without sockets, tasks, clocks or a database."""
