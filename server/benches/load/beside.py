"""Measures the inter-token latency of 16 streams: alone, beside 16 more streams that read normally, and beside clients
that read slowly or vanish. `beside.py URL SECONDS`; called by run.sh."""

import asyncio
import json
import sys
import time
from urllib.parse import urlsplit

MEASURED = 16
OTHERS = 16


async def open_stream(address, tokens):
    """Opens a stream and reads the response head. Raises an error unless the status is 200."""
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    body = json.dumps({"prompt": "Once upon a time", "max_tokens": tokens, "ignore_eos": True, "stream": True})
    head = f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    writer.write((head + body).encode())
    head = await reader.readuntil(b"\r\n\r\n")
    if not head.startswith(b"HTTP/1.1 200"):
        raise RuntimeError(head.decode())
    return reader, writer


async def measured(address, until, gaps):
    """Reads streams one after another and records the time between their events."""
    while time.monotonic() < until:
        reader, writer = await open_stream(address, 200)
        last = None
        async for line in reader:
            if line.startswith(b"data: {"):
                now = time.monotonic()
                if last is not None:
                    gaps.append(now - last)
                last = now
            elif line.startswith(b"data: [DONE]"):
                break
        writer.close()


async def slow(address, until):
    """Reads a few bytes a second."""
    reader, writer = await open_stream(address, 100_000)
    while time.monotonic() < until:
        await reader.read(64)
        await asyncio.sleep(1)
    writer.transport.abort()


async def vanishing(address, until):
    """Opens streams again and again, and disconnects from each after its first event."""
    while time.monotonic() < until:
        reader, writer = await open_stream(address, 100_000)
        await reader.readuntil(b"data: {")
        writer.transport.abort()
        await asyncio.sleep(0.1)


async def phase(name, address, seconds, others):
    until, gaps = time.monotonic() + seconds, []
    streams = [measured(address, until, gaps) for _ in range(MEASURED)]
    await asyncio.gather(*streams, *(other(until) for other in others))
    gaps.sort()
    at = lambda share: gaps[int((len(gaps) - 1) * share)] * 1e3
    print(f"{name}: inter-token p50 {at(0.5):.1f} ms, p99 {at(0.99):.1f} ms, most {gaps[-1] * 1e3:.0f} ms, {len(gaps)} gaps")
    await asyncio.sleep(1)


async def main():
    address, seconds = urlsplit(sys.argv[1]), float(sys.argv[2])
    same = [lambda until: measured(address, until, [])] * OTHERS
    bad = [lambda until: slow(address, until)] * (OTHERS // 2)
    bad += [lambda until: vanishing(address, until)] * (OTHERS // 2)
    for round in range(2):
        await phase("alone", address, seconds, [])
        await phase(f"beside {OTHERS} of the same", address, seconds, same)
        await phase(f"beside {OTHERS // 2} slow and {OTHERS // 2} vanishing", address, seconds, bad)


asyncio.run(main())
