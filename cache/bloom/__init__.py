"""Bloom filters (B. H. Bloom, CACM 13(7), 1970) over block keys: sets that may say yes too often
and never no.

`blocked`: asked before a look-up in a slow tier. `counting`: what a replica keeps of its own keys,
and publishes by the messages in `flips`. `sliced`: the filters of many replicas side by side, as an
ingress follows them; `columns` is its store.

Keys are keyed hashes already (`cache.keys`), so positions are bits of the key: nothing is hashed
again, and nobody without the secret can choose them.
"""
