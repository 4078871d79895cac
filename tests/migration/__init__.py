"""Tests of what helps a fleet to move."""
