from typing import Any


class _Group:
    def wait(self, seconds: float) -> bool:
        return True


def placement_group(bundles: Any, strategy: str) -> _Group:
    return _Group()


def remove_placement_group(group: _Group) -> None:
    pass


def get_node_ip_address() -> str:
    return "127.0.0.1"
