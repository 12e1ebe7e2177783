"""`shoal bench cluster`: routing policies against each other, simulated and over real sockets."""
