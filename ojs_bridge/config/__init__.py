"""Settings and policies, and the places in which they are found."""
