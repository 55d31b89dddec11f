"""The console: pages about a broker and its stages, from a process of its own."""
