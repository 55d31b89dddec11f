"""Version number of truenext."""

VERSION = "0.1.0"
