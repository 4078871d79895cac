"""The specification, as pure functions: no I/O, no clock, no global."""
