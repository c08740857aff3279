"""The planner: which layout of a model on a cluster fits, how fast it will be, and why. No torch, no deepspeed."""
