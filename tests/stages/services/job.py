"""The message of the services of the tests."""

import msgspec


class Job(msgspec.Struct):
    number: int
