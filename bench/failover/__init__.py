"""`shoal bench failover`: what clients notice of engines that die."""
