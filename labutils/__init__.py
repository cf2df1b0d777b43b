"""The tested implementations behind the labs: a module per concept, read as in `zero.partition`."""
