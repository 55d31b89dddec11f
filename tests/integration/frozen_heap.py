"""What is done once for all forked processes, after all modules are loaded.

- The parsers of selectors are made, which takes half of the processor time of a broker's start.
- Segments of new journals are small.
- All objects are excluded from garbage collection: a collection in a forked process would copy their pages.

This module is loaded last.
"""

import gc

from tests.integration.forked import SEGMENT_BYTES
from truenext.model.selector import prepare_compiler
from truenext.store.embedded import EmbeddedStore

prepare_compiler()
assert EmbeddedStore.__init__.__kwdefaults__ is not None
EmbeddedStore.__init__.__kwdefaults__["segment_bytes"] = SEGMENT_BYTES
gc.collect()
gc.freeze()
