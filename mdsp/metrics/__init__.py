"""What a step cost and where the time went: FLOPs, timeline, bubble, run directory, monitor, report."""
