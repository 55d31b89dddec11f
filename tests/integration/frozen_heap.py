"""What is done once for all forked processes, after all modules are loaded.

- The parsers of selectors are made, which takes half of the processor time of a broker's start.
- Segments of new journals are small: each broker writes two of them, full of zeros, at its start.
- All objects are excluded from garbage collection: a collection in a forked process would copy their pages.

This module is loaded last.
"""

import gc

from truenext.model.selector import prepare_compiler
from truenext.store.embedded import EmbeddedStore

SEGMENT_BYTES = 4 * 1024 * 1024

prepare_compiler()
assert EmbeddedStore.__init__.__kwdefaults__ is not None
EmbeddedStore.__init__.__kwdefaults__["segment_bytes"] = SEGMENT_BYTES
gc.collect()
gc.freeze()
