class RayActorError(Exception):
    pass


class RayTaskError(Exception):
    pass
