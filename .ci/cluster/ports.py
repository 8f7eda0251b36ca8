"""Ports for servers that are started later, or stopped and started again at the same address."""

import pathlib
import random
import socket

HOST = "127.0.0.1"
PORTS = range(10_000, 65_536)
_given: set[int] = set()


def free_port() -> int:
    """A port that this function has not returned before and that the system gives to nobody by itself.

    The system could give one of its own choice to another listener, or to a connection, before its server listens.
    """
    lowest, highest = map(int, pathlib.Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    # A system may keep all of them for itself; then one of its own has to do.
    ports = [port for port in PORTS if not lowest <= port <= highest] or list(PORTS)
    for port in random.sample(ports, len(ports)):
        if port in _given:
            continue
        with socket.socket() as listener:
            # A connection that was closed a moment ago does not make a port unfit.
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                listener.bind((HOST, port))
            except OSError:
                continue
        _given.add(port)
        return port
    raise OSError(f"no port from {PORTS.start} to {PORTS.stop - 1} is free")
