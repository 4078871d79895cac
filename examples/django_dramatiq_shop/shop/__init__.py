"""An online shop on Django and Dramatiq."""
