"""What moving a fleet to the bridge would change, task by task, before anything is moved."""
