"""What becomes of jobs that are sent with a delay, on each framework alone and with the bridge."""
