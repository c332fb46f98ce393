"""The leader of a group says a verb, and every other member does it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from stratagem.wire.collective import Collective
from stratagem.wire.tree import broadcast_tree

#: the verb that ends a loop
END = "end"


class CommandLoop:
    """One group's channel for verbs; every method is collective."""

    def __init__(self, collective: Collective) -> None:
        self._collective = collective

    def tell(self, verb: str, *arguments: Any) -> None:
        """As the leader: have the other members do this now."""
        broadcast_tree(self._collective, [verb, list(arguments)])

    def hear(self) -> tuple[str, list[Any]]:
        """As another member: the next verb with its arguments."""
        verb, arguments = broadcast_tree(self._collective)
        return verb, arguments

    def serve(self, verbs: Mapping[str, Callable[..., Any]]) -> list[Any]:
        """As another member: do what the leader says until it ends; return what it said then."""
        while True:
            verb, arguments = self.hear()
            if verb == END:
                return arguments
            verbs[verb](*arguments)
