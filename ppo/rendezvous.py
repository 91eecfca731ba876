"""Wait until all learners of a run have started, before TensorFlow connects them.

TensorFlow holds Python's interpreter lock while it waits for other learners, so no
signal and no thread could end the wait. Therefore, learners first connect over plain
TCP: the chief listens on its address, every other learner sends one line of JSON with
its index and its list of addresses, and the chief replies to each of them with a line
once all learners have connected. TensorFlow then listens on the same ports.
"""

import contextlib
import json
import selectors
import socket
import time
from collections.abc import Sequence
from typing import Final

from ppo.errors import ConfigError, LearnerLostError

#: Maximum seconds for a connection attempt, and for learner 0 to wait until another
#: learner has disconnected.
_CONNECT_SECONDS: Final = 5.0
#: Pause between two connection attempts.
_RETRY_SECONDS: Final = 0.25
_MAX_LINE_BYTES: Final = 1 << 16
_READY: Final = b'"ready"\n'


def wait_for_learners(
    addresses: Sequence[str], index: int, timeout_seconds: float
) -> None:
    """Wait until every learner has called this function.

    Args:
      addresses: Addresses of all learners, the chief first.
      index: Index of this learner in `addresses`.
      timeout_seconds: Maximum time to wait.

    Raises:
      ConfigError: Another learner has a different list of addresses, or the host name
        of learner 0 is invalid.
      LearnerLostError: Another learner did not start in time, or this learner's port
        cannot be opened.
    """
    deadline = time.monotonic() + timeout_seconds
    reason = "no connection"
    if index:
        while (remaining := deadline - time.monotonic()) > 0:
            try:
                if _wait_for_chief(addresses, index, deadline):
                    return
                reason = "the learner has exited, or another program uses its port"
            except OSError as error:
                reason = error.strerror or str(error)
            except UnicodeError as error:
                raise ConfigError(
                    f"Learner {index}: expected TF_CONFIG to list a valid host name "
                    f"for learner 0, got {addresses[0]} ({error}); correct it."
                ) from None
            time.sleep(min(_RETRY_SECONDS, remaining))
        missing = [0]
    elif not (missing := _accept_learners(addresses, deadline)):
        return
    names = ", ".join(f"learner {number} ({addresses[number]})" for number in missing)
    raise LearnerLostError(
        f"Learner {index}: expected to connect to {names} within {timeout_seconds:g} s "
        f"({reason}); start all learners, each with its own index in TF_CONFIG, on "
        "ports that are free and reachable, or raise --rendezvous-timeout."
    )


def _wait_for_chief(addresses: Sequence[str], index: int, deadline: float) -> bool:
    """Connect to the chief; return whether it reports that all learners connected."""
    host, _, port = addresses[0].rpartition(":")
    address = host.strip("[]"), int(port)
    with socket.create_connection(address, _CONNECT_SECONDS) as chief:
        chief.sendall(json.dumps([index, list(addresses)]).encode() + b"\n")
        chief.settimeout(max(0.001, deadline - time.monotonic()))
        with chief.makefile("rb") as stream:
            line = stream.readline(_MAX_LINE_BYTES)
    if line == _READY:
        return True
    with contextlib.suppress(ValueError, TypeError, RecursionError):
        number, theirs = json.loads(line)
        if number == 0 and theirs != addresses:
            raise ConfigError(_describe_difference(0, theirs, index, addresses))
    return False


def _accept_learners(addresses: Sequence[str], deadline: float) -> list[int]:
    """Accept the connections of all other learners; only the chief calls this function.

    Returns:
      The indices of the learners that did not connect before `deadline`.
    """
    port = addresses[0].rpartition(":")[2]
    is_dual = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if is_dual else socket.AF_INET
    try:
        server = socket.create_server(
            ("", int(port)), family=family, dualstack_ipv6=is_dual, backlog=128
        )
    except (OSError, OverflowError) as error:
        raise LearnerLostError(
            f"Learner 0: cannot listen on port {port}, which TF_CONFIG lists: {error}; "
            "stop the program that uses it, or choose another port."
        ) from None
    with contextlib.ExitStack() as stack:
        stack.enter_context(server)
        selector = stack.enter_context(selectors.DefaultSelector())
        selector.register(server, selectors.EVENT_READ)
        buffers: dict[socket.socket, bytes] = {}
        joined: dict[int, socket.socket] = {}
        while len(joined) < len(addresses) - 1 and time.monotonic() < deadline:
            for key, _ in selector.select(deadline - time.monotonic()):
                peer = key.fileobj
                assert isinstance(peer, socket.socket)
                if peer is server:
                    peer = stack.enter_context(server.accept()[0])
                    peer.setblocking(False)
                    selector.register(peer, selectors.EVENT_READ)
                    buffers[peer] = b""
                    continue
                with contextlib.suppress(OSError):
                    data = peer.recv(_MAX_LINE_BYTES)
                    buffers[peer] += data
                    if data and len(buffers[peer]) < _MAX_LINE_BYTES:
                        number = _read_index(peer, buffers[peer], addresses)
                        if number is not None:
                            joined[number] = peer
                        continue
                # The connection was closed, or the peer is not a learner.
                selector.unregister(peer)
                peer.close()
                joined = {n: other for n, other in joined.items() if other is not peer}
        missing = [n for n in range(1, len(addresses)) if n not in joined]
        for peer in joined.values() if not missing else ():
            with contextlib.suppress(OSError):
                peer.settimeout(_CONNECT_SECONDS)
                peer.sendall(_READY)
                # Let the learner close the connection first, so that the chief's port
                # is free again.
                peer.recv(1)
    return missing


def _read_index(
    peer: socket.socket, line: bytes, addresses: Sequence[str]
) -> int | None:
    """Return the index that a learner has sent; None if the line is incomplete.

    Raises:
      ConfigError: The learner has a different list of addresses.
      OSError: The peer is not a learner.
    """
    if not line.endswith(b"\n"):
        return None
    try:
        number, theirs = json.loads(line)
        are_texts = all(isinstance(address, str) for address in theirs)
    except (ValueError, TypeError, RecursionError) as error:
        raise ConnectionError("expected a learner's line") from error
    if not (are_texts and isinstance(number, int) and 0 < number < len(theirs)):
        raise ConnectionError("expected a learner's line")
    if theirs != list(addresses):
        with contextlib.suppress(OSError):
            peer.send(json.dumps([0, list(addresses)]).encode() + b"\n")
        raise ConfigError(_describe_difference(number, theirs, 0, addresses))
    return number


def _describe_difference(
    number: int, theirs: Sequence[str], index: int, ours: Sequence[str]
) -> str:
    """Return the error text for two learners whose lists of addresses differ."""
    return (
        f"Learner {index}: TF_CONFIG lists {len(ours)} workers ({', '.join(ours)}), "
        f"but the TF_CONFIG of learner {number} lists {len(theirs)} "
        f"({', '.join(theirs)!s:.500}); give all learners the same list, in the same "
        "order."
    )
