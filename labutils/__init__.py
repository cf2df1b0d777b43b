"""The tested implementations behind the labs: a module per concept, read as in `zero.partition`."""

__version__ = "0.1.0"
