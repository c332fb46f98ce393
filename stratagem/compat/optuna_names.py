"""Lists every private name of Optuna that the package uses, and why.

All are attributes, read where they are needed; `tests/compat` fails for unlisted names.
"""

from __future__ import annotations

#: private name (tests/compat has an object of each kind), and why it is needed
PRIVATE = {
    "FrozenTrial._trial_id": "to report the epochs of a trial that is known by its number",
}
