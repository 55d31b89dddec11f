"""What stages are and what becomes of what they say: pure, without sockets, tasks, clocks or a database."""
