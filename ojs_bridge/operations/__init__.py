"""The operator's objects, which a bridge has as attributes."""
