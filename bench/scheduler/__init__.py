"""`shoal bench scheduler`: what a plan costs, what overlap gains, what classes do in a burst."""
