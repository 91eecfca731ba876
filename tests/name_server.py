"""A DNS server for tests, which answers from a file that may change.

    python tests/name_server.py 192.0.2.1 FILE

FILE is a JSON object that maps each name to a list of addresses. A name with an empty
list does not exist, like a headless service without ready pods.
"""

from __future__ import annotations

import json
import socket
import struct
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path


def answer(query: bytes, names: Mapping[str, Sequence[str]]) -> bytes:
    """Return the answer to a DNS query, with addresses only if it is for IPv4."""
    labels, at = [], 12
    while length := query[at]:
        labels.append(query[at + 1 : at + 1 + length].decode("ascii"))
        at += 1 + length
    (kind,) = struct.unpack_from("!H", query, at + 1)
    known = names.get(".".join(labels).lower(), ())
    addresses = known if kind == 1 else ()
    flags = 0x8580 | (0 if known else 3)  # authoritative answer; 3 is NXDOMAIN
    header = struct.pack("!2s5H", query[:2], flags, 1, len(addresses), 0, 0)
    records = [
        b"\xc0\x0c" + struct.pack("!HHIH4s", 1, 1, 0, 4, socket.inet_aton(address))
        for address in addresses
    ]
    return header + query[12 : at + 5] + b"".join(records)


def main(host: str, file: str) -> None:
    with socket.socket(type=socket.SOCK_DGRAM) as server:
        server.bind((host, 53))
        print("ready", flush=True)
        while True:
            query, client = server.recvfrom(512)
            server.sendto(answer(query, json.loads(Path(file).read_text())), client)


if __name__ == "__main__":
    main(*sys.argv[1:])
