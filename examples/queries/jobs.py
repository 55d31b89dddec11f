"""Two streaming queries of Spark on the orders of a shop, each a job that may be killed at any time.

    archive    the topic VirtualTopic.orders ──▶ Parquet files
    billing    the topic VirtualTopic.orders ──▶ join with a Parquet table of taxes ──▶ the queue bills

Each copies the waiting messages, in batches, and ends: `python -m examples.queries.jobs archive FOLDER`. The broker
and the job's user are named by the environment variables TRUENEXT_URL, TRUENEXT_USER, TRUENEXT_PASSWORD_FILE and
TRUENEXT_CA, as for the commands of truenext.
"""

import argparse
import os
from collections.abc import Mapping

from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql.streaming.readwriter import DataStreamWriter

from truenext.spark.session import start

BILLS = "bills"
BATCH_ROWS = 200
ORDER = "id string, item string, card string, cents int"
"""Fields of `examples.orders.service.Order`."""
VARIABLES = {
    "url": "TRUENEXT_URL",
    "user": "TRUENEXT_USER",
    "passwordFile": "TRUENEXT_PASSWORD_FILE",
    "ca": "TRUENEXT_CA",
}
"""Environment variable of each option that names the broker or the user."""


def queue_of(job: str) -> str:
    """Return the queue from which a job receives its copies of the orders."""
    return f"Consumer.{job}.VirtualTopic.orders"


def archive(orders: DataFrame, broker: dict[str, str], folder: str) -> DataStreamWriter:
    return orders.writeStream.format("parquet").option("path", f"{folder}/orders")


def billing(orders: DataFrame, broker: dict[str, str], folder: str) -> DataStreamWriter:
    taxes = orders.sparkSession.read.parquet(f"{folder}/taxes.parquet")
    bills = orders.join(taxes, "item").selectExpr(
        "to_json(named_struct('order', id, 'cents', cents + cents * percent div 100)) AS body", "priority"
    )
    return bills.writeStream.format("truenext").options(**broker, queue=BILLS)


JOBS = {"archive": archive, "billing": billing}


def broker_options(environment: Mapping[str, str], job: str) -> dict[str, str]:
    """Return the options of source and sink that name broker, user and space."""
    given = {option: environment[name] for option, name in VARIABLES.items() if name in environment}
    return {**given, "space": job}


def main(job: str, folder: str, broker: dict[str, str], master: str) -> None:
    messages = (
        start(master)
        .readStream.format("truenext")
        .options(**broker, queue=queue_of(job), body="string", maxRowsPerTrigger=BATCH_ROWS)
        .load()
    )
    orders = messages.select("sequence", "priority", F.from_json("body", ORDER).alias("order"))
    query = (
        JOBS[job](orders.select("sequence", "priority", "order.*"), broker, folder)
        .option("checkpointLocation", f"{folder}/checkpoint")
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m examples.queries.jobs", description="A query of the demo.")
    parser.add_argument("job", choices=JOBS)
    parser.add_argument("folder", help="where the query has its checkpoint and its files")
    parser.add_argument("--master", default="local[2]", help="Spark's master [default: local[2]]")
    # The jobs are short, so better compilation by Java would cost more time than it saves.
    os.environ.setdefault("JAVA_TOOL_OPTIONS", "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC")
    arguments = parser.parse_args()
    main(arguments.job, arguments.folder, broker_options(os.environ, arguments.job), arguments.master)
