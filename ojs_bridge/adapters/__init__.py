"""What the adapters of both frameworks use, and nothing below them needs."""
