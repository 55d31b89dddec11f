"""What was loaded before stays for good: a process that is forked off need not look at it for garbage, which would copy
all of it. The last that is loaded."""

import gc

gc.collect()
gc.freeze()
