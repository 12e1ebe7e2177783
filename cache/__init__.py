"""Block keys, block pool and prefix cache: pure state machines. Imports nothing of Shoal's."""
