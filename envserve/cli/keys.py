"""The commands about keys: `invite`, `join`, `clients`, `keys`.

A secret is printed to a terminal only, by `invite`, and read from one without echo.
"""

from __future__ import annotations

import contextlib
import getpass
import inspect
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Final

import typer

from envserve.cli.terminal import fail, make_app
from envserve.errors import AddressError, CodecError, EnvserveError, KeyFileError
from envserve.keys import formats
from envserve.keys.grant import format_line, format_time, parse_words
from envserve.keys.invitation import Invitation
from envserve.keys.key_folder import KeyFolder, Role
from envserve.keys.key_pair import KeyPair

__all__ = ["app"]

app = make_app("", "", is_program=False)
_keys = make_app("keys", "Make keys without a network.", is_program=False)
app.add_typer(_keys, rich_help_panel="Keys")

#: For how long an invitation is good.
_INVITATION_SECONDS: Final = 15 * 60

#: What `invite` can say of a client, as in the file `clients`.
_LIMITS: Final = {
    "envs": "Patterns of env names, with commas; by default all that are served.",
    "max-envs": "Most envs at a time.",
    "max-processes": "Most worker processes at a time.",
    "max-leases": "Most leases at a time.",
    "max-row-mib": "Most MiB of memory for rows.",
    "expose": "Attributes of envs it may use, as in --expose there, with commas.",
    "kwargs": "Arguments of envs it may set, as in --allow-kwarg, with commas.",
    "share": "Its weight while others wait; 1 by default.",
    "expires": "Date from which on it is unknown.",
}

_Home = Annotated[
    Path | None,
    typer.Option(
        envvar="ENVSERVE_HOME", help="Folder of keys; by default ~/.config/envserve."
    ),
]
_At = Annotated[
    list[str],
    typer.Option(
        help="Host that clients reach the server by, or host:port; repeatable."
    ),
]


@contextlib.contextmanager
def _refusals() -> Iterator[None]:
    """Ends a command with a line: exit code 2, or 1 if a server is why."""
    try:
        yield
    except EnvserveError as error:
        fail(error, 2 if isinstance(error, CodecError | KeyFileError) else 1)


def _with_limits(command: Callable[..., None]) -> Callable[..., None]:
    """Gives a command an option for each limit, in place of `given`."""
    parameters = [
        parameter
        for parameter in inspect.signature(command, eval_str=True).parameters.values()
        if parameter.name != "given"
    ]
    for option, text in _LIMITS.items():
        kind = Annotated[str | None, typer.Option(f"--{option}", help=text)]
        name = option.replace("-", "_")
        parameters.append(
            inspect.Parameter(name, parameters[0].kind, default=None, annotation=kind)
        )
    vars(command)["__signature__"] = inspect.Signature(parameters)
    return command


@app.command(rich_help_panel="Keys")
@_with_limits
def invite(
    *,
    name: Annotated[str, typer.Argument(help="What the client will be called.")],
    at: _At,
    stdout: Annotated[
        bool, typer.Option("--stdout", help="Print it though that is no terminal.")
    ] = False,
    home: _Home = None,
    **given: str | None,
) -> None:
    """Invite a client: prints one line, for one use, for 15 minutes."""
    with _refusals():
        at = _completed(at)
        if not (stdout or sys.stdout.isatty()):
            raise CodecError(
                "an invitation is a secret, and stdout is no terminal; say --stdout if "
                "nobody else reads what it goes to"
            )
        folder, pair, now = KeyFolder(home), KeyPair.make(), time.time()
        options = [f"{n.replace('_', '-')}={v}" for n, v in given.items() if v]
        key = formats.encode(formats.INVITATION, pair.public)
        until = f"until={format_time(now + _INVITATION_SECONDS)}"
        grant = parse_words([name, key, until, *options])
        if not grant.holds(now):
            raise CodecError(
                f"expires: expected a date that is to come; got {given['expires']!r}"
            )
        server = folder.ensure_key("server")
        folder.clients.add(grant, now)
    print(Invitation(server.public, pair.secret, name, tuple(at)).line, flush=True)
    print(
        "A secret, for one use within 15 minutes. There: envserve join", file=sys.stderr
    )


@app.command(rich_help_panel="Keys")
def join(
    line: Annotated[list[str] | None, typer.Argument(hidden=True)] = None,
    timeout: Annotated[
        float, typer.Option(min=0.001, help="Seconds to wait for the server.")
    ] = 10.0,
    home: _Home = None,
) -> None:
    """Join a server: asks for the line that `envserve invite` printed there."""
    with _refusals():
        if line:
            raise CodecError(
                "an invitation is a secret, and a command line is not; "
                'run "envserve join" and paste it'
            )
        if sys.stdin.isatty():
            text = getpass.getpass("Invitation (it is not shown): ")
        else:
            text = sys.stdin.readline()
        invitation = Invitation.parse(text)
        from envserve.client.link.join import join as enrol

        folder = KeyFolder(home)
        pair = folder.ensure_key("client")
        enrol(invitation, pair, timeout)
        addresses, server = invitation.addresses, invitation.server_public
        before = {address: folder.pinned_key(address) for address in addresses}
        folder.add_pin(addresses, server, invitation.name)
    for address, public in before.items():
        if public not in (None, server):
            print(f"{address} had another key before: {formats.fingerprint(public)}")
    print(
        f"joined {', '.join(addresses)} as {invitation.name}; this client's key is "
        f"{formats.fingerprint(pair.public)}, "
        f"the server's {formats.fingerprint(server)}"
    )


@app.command(rich_help_panel="Keys")
def clients(
    words: Annotated[
        list[str] | None, typer.Argument(metavar="remove NAME", show_default=False)
    ] = None,
    home: _Home = None,
) -> None:
    """List who may use this user's servers, or remove one; they see it themselves."""
    with _refusals():
        file = KeyFolder(home).clients
        match words or []:
            case []:
                file.read()
            case ["remove", name]:
                if not file.remove(name):
                    raise CodecError(f"no client is called {name}: envserve clients")
                print(f"removed {name}")
                return
            case _:
                raise CodecError("expected nothing, or: remove NAME")
    now = time.time()
    for grant in file.grants():
        name, _, *limits = format_line(grant).split()
        state = "invited" if grant.is_invitation else formats.fingerprint(grant.public)
        state = state if grant.holds(now) else "expired"
        print(f"{name:12} {state:19} {' '.join(limits)}".rstrip())


@_keys.command()
def make(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Made if need be.")],
    roles: Annotated[list[str], typer.Argument(help="server, and names of clients.")],
    at: _At,
) -> None:
    """Make a folder per role, to be mounted where it runs; what is there stays.

    Each is an ENVSERVE_HOME: the server's with its keys and clients, a client's with
    its own key and the server's public one. Servers that share the folder are met at
    any address by `--at 'tcp://*:5555'`.
    """
    with _refusals():
        at = _completed(at, may_be_any=True)
        names = [role for role in roles if role != "server"]
        anybodys = formats.encode(formats.PUBLIC, bytes(32))
        for name in names:
            parse_words([name, anybodys])  # no path, say
        server = KeyFolder(folder / "server")
        key = server.ensure_key("server")
        server.ensure_key("client")  # of probes, beside the server
        server.clients.read()
        server.add_pin(at, key.public, "server")  # of those on other hosts
        for name in names:
            client = KeyFolder(folder / name)
            # The pin is written last: with it, a client is whole. The operator may have
            # changed its line, or removed it, since.
            if client.addresses:
                client.add_pin(at, key.public, name)
                continue
            public = formats.encode(formats.PUBLIC, client.ensure_key("client").public)
            server.clients.add(parse_words([name, public]), time.time())
            client.add_pin(at, key.public, name)
    print(f"{folder}: {' '.join(sorted(path.name for path in folder.iterdir()))}")


@_keys.command()
def new(
    role: Annotated[Role, typer.Argument(help="Whose key.")] = "server",
    home: _Home = None,
) -> None:
    """Replace this user's key as a server, or as a client; the old one is gone."""
    with _refusals():
        pair = KeyFolder(home).new_key(role)
    print(f"new {role} key: {formats.fingerprint(pair.public)}")
    if role == "server":
        print(
            "Restart servers that run with the old one. All clients expect the old one "
            "until they join again: envserve invite NAME"
        )
    else:
        print(
            "Restart servers of this user: until then they know the old one. No server "
            "of others knows the new one. On each: envserve clients remove NAME, "
            "envserve invite NAME; then here: envserve join"
        )


def _completed(words: list[str], *, may_be_any: bool = False) -> list[str]:
    """Returns words as addresses that clients could connect to; raises CodecError."""
    from envserve.address import complete

    try:
        addresses = [w if w.startswith("ray://") else complete(w) for w in words]
    except AddressError as error:
        raise CodecError(f"--at: {error}") from None
    none = ("0.0.0.0", "[::]", *(() if may_be_any else ("*", "ray")))
    for word, address in zip(words, addresses, strict=True):
        host = address.removeprefix("tcp://").rpartition(":")[0]
        if address.startswith("ipc://") or host in none:
            raise CodecError(
                f"--at: expected the tcp:// address that clients reach the server by; "
                f"got {word!r:.200}"
            )
    return addresses
