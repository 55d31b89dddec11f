"""Audits by Spark, and its source and sink. Needs `pip install 'truenext[spark]'`; nothing else in truenext does."""
