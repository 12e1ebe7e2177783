"""`shoal deploy`: a configuration onto a Ray cluster that runs, first and again."""
