"""Spark in truenext: audits, and queues as source and sink of Spark. Only this package needs `pip install
'truenext[spark]'`."""
