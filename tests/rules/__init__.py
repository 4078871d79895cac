"""Tests of the pure rules: no broker, no clock, no store."""
