"""Connections from a Spark job to the broker, shared by source and sink."""
