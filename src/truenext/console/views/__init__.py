"""Views: ask the broker, and make the data of each page from its answers. Each view takes a visit."""

import msgspec

from truenext.console.visit import Visit


async def overview(visit: Visit) -> msgspec.Struct:
    raise NotImplementedError


async def queues(visit: Visit) -> msgspec.Struct:
    raise NotImplementedError


async def queue(visit: Visit) -> msgspec.Struct:
    raise NotImplementedError


async def message(visit: Visit) -> msgspec.Struct:
    raise NotImplementedError


async def dead_letters(visit: Visit) -> msgspec.Struct:
    raise NotImplementedError


async def action(visit: Visit) -> msgspec.Struct:
    raise NotImplementedError


async def progress(visit: Visit) -> msgspec.Struct:
    raise NotImplementedError


async def stages(visit: Visit) -> msgspec.Struct:
    raise NotImplementedError


async def flows(visit: Visit) -> msgspec.Struct:
    raise NotImplementedError


async def flow(visit: Visit) -> msgspec.Struct:
    raise NotImplementedError


async def scheduled(visit: Visit) -> msgspec.Struct:
    raise NotImplementedError


async def durable(visit: Visit) -> msgspec.Struct:
    raise NotImplementedError


async def connections(visit: Visit) -> msgspec.Struct:
    raise NotImplementedError


async def spark(visit: Visit) -> msgspec.Struct:
    raise NotImplementedError


async def security(visit: Visit) -> msgspec.Struct:
    raise NotImplementedError


async def settings(visit: Visit) -> msgspec.Struct:
    raise NotImplementedError


async def pause(visit: Visit) -> str:
    raise NotImplementedError


async def resume(visit: Visit) -> str:
    raise NotImplementedError


async def begin_work(visit: Visit) -> str:
    raise NotImplementedError


async def stop_work(visit: Visit) -> str:
    raise NotImplementedError


async def close(visit: Visit) -> str:
    raise NotImplementedError


async def body(visit: Visit) -> bytes:
    raise NotImplementedError
