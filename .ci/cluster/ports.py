"""Ports for servers that are started later, or stopped and started again at the same address."""

import pathlib
import random
import socket

HOST = "127.0.0.1"
PORTS = range(10_000, 65_536)
_given: set[int] = set()


def free_port() -> int:
    """Returns a free port that it has not returned before, outside the range of ephemeral ports.

    The system could assign an ephemeral port to another listener or to a connection before the server listens on it.
    """
    lowest, highest = map(int, pathlib.Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    # If the ephemeral range covers all of them, any port has to do.
    ports = [port for port in PORTS if not lowest <= port <= highest] or list(PORTS)
    for port in random.sample(ports, len(ports)):
        if port in _given:
            continue
        with socket.socket() as listener:
            # A port may be reused although a connection to it was closed a moment ago.
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                listener.bind((HOST, port))
            except OSError:
                continue
        _given.add(port)
        return port
    raise OSError(f"no port from {PORTS.start} to {PORTS.stop - 1} is free")
