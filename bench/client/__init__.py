"""Benchmark of truenext's client: `python -m bench.client`"""
