"""Exclusion of all loaded objects from garbage collection: a collection in a forked process would copy their pages.

This module is loaded last.
"""

import gc

gc.collect()
gc.freeze()
