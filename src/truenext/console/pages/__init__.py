"""Data of each page, and functions that make it from the broker's answers. Pure: no I/O, no clock.

A page is a struct. Its template shows it, and with `Accept: application/json` it is the answer as JSON.
Fields that end with `_ms` are times in milliseconds since 1970, those with `_s` are durations in seconds.
"""
