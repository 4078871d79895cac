"""Tests of what the adapters of both frameworks use."""
