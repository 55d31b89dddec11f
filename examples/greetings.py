"""Service of one stage, without a database: the example of compose.yaml.

`truenext stages send greetings:app greetings.hello '"world"' --trace first --ask` prints its reply.
"""

from truenext.stage import Service

app = Service("greetings")


@app.single("greetings.hello", str, str)
async def hello(name: str) -> str:
    return f"hello, {name}"
