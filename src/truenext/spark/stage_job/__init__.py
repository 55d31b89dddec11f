"""A stage as a Spark job: a transform of DataFrames takes the place of the function of a stage.
docs/stage-as-spark-job.md shows how to use it."""

from truenext.spark.stage_job.job import stage_job as stage_job
