"""Interceptors around every run of a stage: log fields, metrics and spans."""
