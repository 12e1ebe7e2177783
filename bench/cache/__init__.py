"""`shoal bench cache`: costs of the prefix cache by size, and its hit rate against references."""
