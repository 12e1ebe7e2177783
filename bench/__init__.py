"""Workloads and benchmarks. May import anything of Shoal's; nothing imports it."""
