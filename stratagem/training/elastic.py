"""Jobs that replicas may leave and join: when to go on without one, and when not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from stratagem.cluster.failure import DEPARTURES, Failure
from stratagem.errors import ReplicaLost, ReplicaStalled

#: how often replicas may die with nothing done in between
IN_VAIN = 3


@dataclass(frozen=True)
class Elastic:
    """Replicas may die and join."""

    #: how many processes must be left to go on
    least: int = 1


def _nobody() -> None:
    return None


def _never() -> bool:
    return False


def _the_end(error: BaseException) -> None:
    raise error


@dataclass
class Again:
    """A call that can be begun again where replicas have left or joined an elastic job."""

    #: how much of it is done, which is in its arguments; None while it cannot be begun again
    done: Callable[[], int | None]
    #: whether the results of all replicas are asked for, and not only this process's own
    whole: bool = False
    #: whether it is about to end: who is here is enough, however few they are
    hurry: Callable[[], bool] = _never
    #: whether another process can take the chief's place in it, where the job outlives the chief
    inherited: bool = False
    #: whether standbys can follow it, and take the place of a follower in its steps
    followed: bool = False
    #: lets tasks join, once the call can be begun again; set by whoever runs the call
    let_join: Callable[[], None] = _nobody
    #: comes together again in the midst of the call, which this process goes on with while the
    #: others begin anew; raises where the job ends
    regroup: Callable[[BaseException], None] = _the_end
    #: with servers, one of which is lost: puts the arguments to what they were at the last
    #: checkpoint; raises where the job ends
    go_back: Callable[[BaseException], None] = _the_end


class Tries:
    """Whether a call goes on after what has happened to it."""

    def __init__(self, elastic: Elastic | None, again: Again | None) -> None:
        self._again = None if elastic is None else again
        #: whether the call may be begun again at all
        self.elastic = self._again is not None
        self._done = -1
        self._in_vain = 0
        #: whether it was said that the call is not begun again
        self._over = False

    def left(
        self, error: BaseException, trouble: Failure | None, *, chief_may_die: bool = False
    ) -> bool:
        """Whether it is begun again: not after an exception, which would come again, nor where
        replicas die time after time with nothing done in between.

        `chief_may_die`: the job outlives its chief; then a call must be one that another inherits.
        """
        chief = trouble is not None and trouble.rank == 0 and trouble.kind in DEPARTURES
        stays = chief and chief_may_die and not (self._again and self._again.inherited)
        self._over = self._over or stays or not self._left(error, trouble)
        return not self._over

    def _left(self, error: BaseException, trouble: Failure | None) -> bool:
        if self._again is None or trouble is None:
            return False
        if not isinstance(error, ReplicaLost | ReplicaStalled):
            return False
        done = self._again.done()
        if done is None or trouble.kind not in ("joined", *DEPARTURES):
            return False
        if trouble.kind == "joined":
            return True
        self._in_vain = 0 if done > self._done else self._in_vain + 1
        self._done = done
        return self._in_vain < IN_VAIN
