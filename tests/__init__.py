"""Tests of ojs_bridge: `make test` runs them."""
