"""Keys, invitations and grants as text: parsing, errors and secrecy."""

from __future__ import annotations

import copy
import errno
import pickle
import re
import traceback

import pytest
import zmq

from envserve.errors import CodecError, KeyFileError
from envserve.keys import formats
from envserve.keys.grant import Grant, format_line, parse_line
from envserve.keys.invitation import Invitation
from envserve.keys.key_pair import KeyPair

PUBLIC = formats.encode(formats.PUBLIC, bytes(range(32)))
KEY_43 = PUBLIC.removeprefix(formats.PUBLIC)


def test_encoded_keys_have_a_prefix_and_can_be_decoded() -> None:
    pair = KeyPair.generate()
    public = formats.encode(formats.PUBLIC, pair.public)
    secret = formats.encode(formats.SECRET, pair.secret)
    assert re.fullmatch(r"envserve-public-1\.[\w-]{43}", public)
    assert re.fullmatch(r"envserve-secret-1\.[\w-]{43}", secret)
    assert formats.decode(formats.PUBLIC, public) == pair.public
    assert KeyPair.from_secret(formats.decode(formats.SECRET, secret)) == pair


@pytest.mark.parametrize(
    "text",
    [
        "",
        KEY_43,
        PUBLIC[:-1],
        PUBLIC + "A",
        PUBLIC + "=",
        PUBLIC[:-1] + "9",  # same bytes, but the unused bits are not 0
        PUBLIC.replace("envserve", "Envserve"),
        PUBLIC[:-1] + "\n",
        PUBLIC[:-2] + "+/",
        PUBLIC[:-1] + "é",
        formats.encode(formats.SECRET, bytes(32)),
    ],
)
def test_only_one_text_decodes_to_a_key(text: str) -> None:
    with pytest.raises(CodecError, match=r"expected envserve-public-1\. and 43 char"):
        formats.decode(formats.PUBLIC, text)


def test_the_error_about_a_misplaced_secret_does_not_repeat_it() -> None:
    secret = formats.encode(formats.SECRET, KeyPair.generate().secret)
    with pytest.raises(CodecError) as caught:
        formats.decode(formats.PUBLIC, secret)
    text = "".join(traceback.format_exception(caught.value))
    assert "got 61 characters that begin with envserve-secret-1." in text
    assert secret[18:] not in text
    with pytest.raises(CodecError) as caught:
        formats.decode(formats.SECRET, secret + "x")
    assert secret[18:] not in "".join(traceback.format_exception(caught.value))


def test_a_secret_does_not_appear_in_reprs_pickles_and_copies() -> None:
    pair = KeyPair.generate()
    invitation = Invitation(pair.public, pair.secret, "ci", ("tcp://sim1:5555",))
    for thing in (pair, invitation):
        assert repr(pair.secret)[2:-1] not in repr(thing)
        assert "secret" not in repr(thing)
    for take in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match="cannot be pickled"):
            take(pair)


def test_keys_require_curve(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(_: bytes) -> bytes:
        raise zmq.ZMQError(errno.ENOTSUP)

    monkeypatch.setattr(zmq, "curve_public", fails)
    with pytest.raises(KeyFileError, match="ZeroMQ does not support CURVE"):
        KeyPair.generate()


def test_fingerprints_are_groups_of_four_characters() -> None:
    assert formats.fingerprint(bytes(32)) == "MZUH-VLPY-MK6X-O3EP"
    assert formats.fingerprint(bytes(31) + b"\1") != formats.fingerprint(bytes(32))


def test_an_invitation_is_one_line_and_can_be_parsed() -> None:
    pair, server = KeyPair.generate(), KeyPair.generate()
    addresses = ("tcp://sim1:5555", "tcp://[::1]:7", "tcp://[fe80::1%eth0]:8")
    invitation = Invitation(server.public, pair.secret, "trainer-1", addresses)
    line = invitation.line
    assert re.fullmatch(
        r"envserve-invite-1\.[\w-]{86}\.trainer-1@sim1:5555,\[::1\]:7,\[fe80::1%eth0\]:8",
        line,
    )
    assert Invitation.parse(f"  {line}\n") == invitation


def test_an_invitation_that_is_cut_off_is_called_incomplete() -> None:
    with pytest.raises(CodecError, match="of 30 characters, which is incomplete"):
        Invitation.parse(formats.INVITATION + (30 - len(formats.INVITATION)) * "x")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("@", "@\x1b[2J"),
        (".trainer-1@", "@"),
        ("5555", "port"),
        ("5555", "70000"),
        ("invite", "public"),
        ("@sim1:5555", ""),
        ("-1.", "-1.A"),
    ],
)
def test_a_changed_invitation_raises_codec_error(old: str, new: str) -> None:
    pair = KeyPair.generate()
    line = Invitation(pair.public, pair.secret, "trainer-1", ("tcp://sim1:5555",)).line
    with pytest.raises(CodecError, match="expected") as caught:
        Invitation.parse(line.replace(old, new, 1))
    assert line[20:60] not in str(caught.value)


def test_a_line_of_clients_is_parsed_as_a_grant() -> None:
    grant = parse_line(
        f"trainer-1  {PUBLIC}  envs=ALE/*,CartPole-v1 max-envs=64 max-processes=16 "
        f"max-leases=2 expose=get:level,call:render kwargs=level:int[0,10],kind:a|b "
        f"share=2. expires=2027-01-01  # the big one"
    )
    assert grant == Grant(
        name="trainer-1",
        public=bytes(range(32)),
        envs=("ALE/*", "CartPole-v1"),
        max_envs=64,
        max_processes=16,
        max_leases=2,
        exposed=("get:level", "call:render"),
        allowed_kwargs=("level:int[0,10]", "kind:a|b"),
        share=2.0,
        expires=1798761600.0,
    )
    assert parse_line(format_line(grant)) == grant
    assert not grant.is_invitation
    assert [grant.is_valid(now) for now in (1798761599.9, 1798761600.0)] == [
        True,
        False,
    ]
    names = ("ALE/Pong-v5", "CartPole-v1", "CartPole-v10", "ale/Pong-v5")
    assert [grant.allows_env(name) for name in names] == [True, True, False, False]


def test_a_line_without_options_leaves_all_limits_to_the_host() -> None:
    grant = parse_line(f"ci {PUBLIC}")
    assert grant == Grant(name="ci", public=bytes(range(32)))
    assert (grant.max_envs, grant.exposed, grant.expires) == (None, None, None)
    assert grant.allows_env("CartPole-v1")
    assert format_line(grant).split() == ["ci", PUBLIC]
    assert parse_line("") is parse_line("  # nobody yet") is None


def test_an_invitation_in_clients_has_an_expiry_time() -> None:
    line = f"ci envserve-invite-1.{KEY_43} until=2026-11-22T10:15:00Z"
    grant = parse_line(line)
    assert grant is not None
    assert grant.is_invitation
    assert format_line(grant).split() == line.split()
    assert [grant.is_valid(now) for now in (1795342499, 1795342500)] == [True, False]


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("ci", "expected a name, a public key and options"),
        (f"local {PUBLIC}", "expected a name other than local"),
        (f"envserve-secret-1.{KEY_43} {PUBLIC}", "expected a name other"),
        (
            f"ci {PUBLIC} envserve-secret-1.{KEY_43}",
            "unknown option or invalid value: 'envserve-secret-1'; ",
        ),
        (f"a/b {PUBLIC}", r"^name: expected up to 64 characters of .*; got 'a/b'$"),
        (f"{'a' * 65} {PUBLIC}", "name"),
        (
            f"ci {PUBLIC} maxenvs=3",
            "unknown option or invalid value: 'maxenvs'; .*max-envs",
        ),
        (f"ci {PUBLIC} name=x", "expected OPTION=VALUE"),
        (f"ci {PUBLIC} max-envs", "expected OPTION=VALUE"),
        (f"ci {PUBLIC} max-envs=0", "^max-envs: expected an int >= 1; got '0'$"),
        (f"ci {PUBLIC} max-envs=many", "^max-envs: expected an int; got 'many'$"),
        (f"ci {PUBLIC} max-envs=envserve-secret-1.{KEY_43}", "'envserve-secret-1'$"),
        (f"ci {PUBLIC} envs=a,", r"^envs: expected a str of length >= 1; got 'a,'$"),
        (
            f"ci {PUBLIC} expose=level,see:level",
            "^expose: expected NAME, get:NAME, .*; got 'level,see:level'$",
        ),
        (f"ci {PUBLIC} kwargs=level:int[0,10", "exp"),
        (
            f"ci {PUBLIC} kwargs=a,x:int[5,0]",
            r"^kwargs: .* range .*; got 'a,x:int\[5,0",
        ),
        (f"ci {PUBLIC} share=0", "^share: expected a number > 0.0; got '0'$"),
        (f"ci {PUBLIC} share=much", "^share: expected a number; got 'much'$"),
        (f"ci {PUBLIC} share=nan", "share: expected a number .*; got 'nan'$"),
        (f"ci {PUBLIC} share=inf", "share: expected a number .*; got 'inf'$"),
        (f"ci {PUBLIC} expires=soon", "expires: expected a date"),
        (f"ci {PUBLIC} expires=0001-01-01T00+14:00", "expires: expected a date"),
        (f"ci {PUBLIC} until=2027-01-01", "until= for an invitation"),
        (f"ci envserve-invite-1.{KEY_43}", "until= for an invitation"),
        (f"ci envserve-secret-1.{KEY_43}", r"begin with envserve-secret-1\.$"),
    ],
)
def test_an_invalid_line_of_clients_raises_codec_error(line: str, text: str) -> None:
    with pytest.raises(CodecError, match=text) as caught:
        parse_line(line)
    assert KEY_43 not in str(caught.value)
