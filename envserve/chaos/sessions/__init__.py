"""A simulation of the conversation between clients and servers, in virtual time.

Both halves of `envserve.session` are the real ones. Network, workers, clocks and
callers are made up, fail in every way they can, and follow from one seed.
"""

from envserve.chaos.sessions.faults import strike
from envserve.chaos.sessions.ledger import Ledger, Violation
from envserve.chaos.sessions.profile import FAULTS, Profile
from envserve.chaos.sessions.world import World, simulate

__all__ = ["FAULTS", "Ledger", "Profile", "Violation", "World", "simulate", "strike"]
