"""Under which name and which membership a process changes the origin."""

from collections.abc import Callable
from dataclasses import dataclass

from tiergate.errors import MembershipOverError
from tiergate.model import Actor, Holder


def _nobody() -> Holder | None:
    return None


def _always() -> bool:
    return True


@dataclass(frozen=True, slots=True)
class Standing:
    """Of the process that `token` names. `me`: its node's membership, None for a node alone; raises
    `MembershipOverError` between two. `stands`: whether that may act now, by this machine's clock. `is_shared`: other
    nodes write into the same origin through the same directory."""

    token: str = ""
    me: Callable[[], Holder | None] = _nobody
    stands: Callable[[], bool] = _always
    is_shared: bool = False

    def check(self, since: Holder | None) -> None:
        """To be called right before each change of the origin that can be seen. `since`: the membership under which
        that was decided (None: of a node alone). A new one makes up for nothing: others did what was left of the old.

        Raises:
            MembershipOverError: this node must not make that change any more; others may be at it.
        """
        if not self.stands() or self.me() != since:
            raise MembershipOverError("this node's lease was not renewed in time: it changes nothing in the origin")

    @property
    def actor(self) -> Actor:
        """This process as steps name it.

        Raises:
            MembershipOverError: its node is no member now.
        """
        return Actor(self.token, self.me())


ALONE = Standing()
"""Of a node without a cluster, where nobody else's steps need to be told apart from its own."""
