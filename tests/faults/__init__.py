"""Real jobs that are killed, stopped, starved of disk and given damaged files."""
