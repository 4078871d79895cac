"""Settings and policies, and the places that they come from."""
