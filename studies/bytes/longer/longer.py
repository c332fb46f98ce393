"""2000 steps of the clothes: how long top-k and DiLoCo need to be as good as every step."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
import study

if __name__ == "__main__":
    study.common.main(
        __file__,
        __doc__ or "",
        partial(study.study, tasks=(study.LONGER,)),
        study.report,
        study.draw,
    )
