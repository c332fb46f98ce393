"""One task of a cluster that `stratagem run` starts."""

import sys

from tests.golden.cases import be_a_task

be_a_task(sys.argv[1])
