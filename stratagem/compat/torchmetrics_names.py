"""Lists every private name of torchmetrics that the package uses, and why.

All are attributes, read where they are needed; `tests/compat` fails for unlisted names.
"""

from __future__ import annotations

#: private name (tests/compat has an object of each kind), and why it is needed
PRIVATE = {
    "Metric._defaults": "which states a metric has declared, and so which replicas can join",
    "Metric._computed": "the value of before, which is another with the other replicas' states",
    "Metric._to_sync": "keeps compute() from syncing by itself",
    "Metric._reductions": "how the states of several replicas become one",
    "Metric._update_count": "goes with the states: what counted nothing warns when it is computed",
}
