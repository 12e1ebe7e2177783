"""Bloom filters (B. H. Bloom, CACM 13(7), 1970) over block keys: sets that may say yes too often
and never no.

`blocked`: asked before a look-up in a slow tier. `counting`: a set that keys leave again.
`columns`: many of those side by side, so that one walk of a chain asks all of them. A router
follows by these two the replicas that hold more than it has memory for.

Keys are keyed hashes already (`cache.keys`), so positions are bits of the key: nothing is hashed
again, and nobody without the secret can choose them.
"""
