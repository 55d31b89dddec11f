"""Benchmarks of truenext, also beside ActiveMQ on the same machine."""
