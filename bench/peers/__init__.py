"""Shoal beside other engines, on one machine, in one run: `shoal bench engine --peers`."""
