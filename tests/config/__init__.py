"""Tests of the sources of settings and policies."""
