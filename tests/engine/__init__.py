"""Tests of the calls that both adapters make for a job."""
