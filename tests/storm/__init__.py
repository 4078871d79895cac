"""What a dependency sees of a fleet while it is down, and when it comes back."""
