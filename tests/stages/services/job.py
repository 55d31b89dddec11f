"""What the services of the tests are told to do."""

import msgspec


class Job(msgspec.Struct):
    number: int
