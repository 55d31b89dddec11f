"""Build of the optional module in C; all else about the package is in pyproject.toml.

Without a compiler the module is left out, and the codec runs in Python. `TRUENEXT_SPEEDUPS=0` leaves it out, too: then
a wheel is one for all systems.
"""

import os

from setuptools import Extension, setup

SPEED = Extension("truenext.wire.stomp._speed", ["src/truenext/wire/stomp/_speed.c"], optional=True)

setup(ext_modules=[] if os.environ.get("TRUENEXT_SPEEDUPS") == "0" else [SPEED])
