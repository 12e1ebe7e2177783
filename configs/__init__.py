"""The typed configuration tree. Imports nothing of Shoal's."""
