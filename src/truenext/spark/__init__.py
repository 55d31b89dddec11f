"""What Spark proves from the broker's history. Needs `pip install 'truenext[spark]'`; nothing else in truenext does."""
