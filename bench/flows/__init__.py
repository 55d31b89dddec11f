"""Benchmark of flows of stages: `python -m bench.flows`"""
