"""The planner; `sg.plan(model, batch)` calls `stratagem.plan.notebook.plan`.

The package bears the name of its main function, so it can be called itself: whichever of the two
`sg.plan` has found, both work.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any


class _Package(ModuleType):
    def __call__(self, *args: Any, **options: Any) -> Any:
        from stratagem.plan.notebook import plan

        return plan(*args, **options)


sys.modules[__name__].__class__ = _Package
