"""Connections from a Spark job to the broker, for source and sink."""
