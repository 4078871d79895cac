"""The demonstration behind `make demo`: real workers of both frameworks on an embedded Valkey."""
