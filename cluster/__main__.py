"""`python -m cluster` is `shoal`."""

from cluster.cli import main

main()
