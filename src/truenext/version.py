"""What this version is called."""

VERSION = "0.1.0"
