"""Tests of the operator's work: dead letters, replays, parked retries, retention."""
