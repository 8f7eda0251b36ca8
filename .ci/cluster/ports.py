"""Ports for servers that are started later, or stopped and started again at the same address."""

import pathlib
import random
import socket

HOST = "127.0.0.1"
LOWEST = 10_000
_given: set[int] = set()


def free_port() -> int:
    """A port that this function has not returned before and that the system gives to nobody by itself.

    The system could give one of its own choice to another listener, or to a connection, before its server listens.
    """
    lowest_of_system = int(pathlib.Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    ports = [port for port in range(LOWEST, lowest_of_system) if port not in _given]
    for port in random.sample(ports, len(ports)):
        with socket.socket() as listener:
            # A connection that was closed a moment ago does not make a port unfit.
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                listener.bind((HOST, port))
            except OSError:
                continue
        _given.add(port)
        return port
    raise OSError(f"no port from {LOWEST} to {lowest_of_system} is free")
