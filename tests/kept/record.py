"""Records `conversation.py` with a broker, for later brokers: `python -m tests.kept.record`.

The file is `conversation-VERSION.txt`, in the format of tests/integration/foreign/recording.py. It is not made anew.
"""

import asyncio
import tempfile
from pathlib import Path

from tests.integration.broker_process import BrokerProcess
from tests.integration.foreign.record import Recorder
from tests.kept.conversation import EXPECTED, converse
from truenext.store.checkpoint_format import FORMAT_VERSION

QUEUE = "{queue}"


async def record(port: int) -> list[str]:
    recorder = Recorder(port)
    server = await asyncio.start_server(recorder.accept, "127.0.0.1", 0)
    url = f"stomp://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    found = await asyncio.to_thread(lambda: list(converse(url, QUEUE)))
    assert found == EXPECTED
    await asyncio.sleep(0.5)
    server.close()
    return recorder.lines


def main() -> None:
    file = Path(__file__).with_name(f"conversation-{FORMAT_VERSION}.txt")
    assert not file.exists(), f"{file} is there: what was recorded is not made anew"
    with tempfile.TemporaryDirectory() as folder:
        broker = BrokerProcess(Path(folder))
        try:
            broker.start()
            lines = asyncio.run(record(broker.port))
            broker.stop()
        finally:
            broker.clean_up()
    head = f"# What the client of the version with format {FORMAT_VERSION} says, recorded by tests/kept/record.py."
    file.write_text("\n".join([head, *lines, ""]))


if __name__ == "__main__":
    main()
