"""How a job of Spark speaks to the broker; source and sink stand on this."""
