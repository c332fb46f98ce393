"""Private names of Optuna that the package uses, and what each is needed for.

All are attributes, read where they are needed; `tests/compat` fails for one that is not listed.
"""

from __future__ import annotations

#: where a name lies (tests/compat has one object of each kind), and why it is needed
PRIVATE = {
    "FrozenTrial._trial_id": "to report the epochs of a trial that is known by its number",
}
