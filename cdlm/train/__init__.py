"""Training: configurations and recipes, the step, the loop, and everything that must survive a crash."""
