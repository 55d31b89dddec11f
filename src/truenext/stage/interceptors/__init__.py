"""Interceptors: hooks around the runs of stages, for log fields, metrics and traces."""
