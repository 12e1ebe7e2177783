"""Ports of this machine."""

import socket


def free_ports(count: int) -> list[int]:
    """Different ones on loopback, free a moment ago."""
    probes = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [int(probe.getsockname()[1]) for probe in probes]
    for probe in probes:
        probe.close()
    return ports
