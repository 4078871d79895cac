"""Measurements of the bridge against the frameworks' own behaviour, in one run: `make bench`."""
