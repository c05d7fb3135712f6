"""The command `polymux`."""
