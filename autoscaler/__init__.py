"""How many engines a model has: decided from what they report, in Serve's controller."""
