"""A cell ends with the time limit of its Slurm job."""

import pytest

from tests.cluster.slurm import jobs_of, missing
from tests.session import hosts
from workbench.errors import CellError

WHY_NOT = hosts.missing() or missing()

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.engines,
    pytest.mark.timeout(600),
    pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT or "can be made"),
]


def test_a_cell_ends_with_the_time_limit_of_its_job(submits_jobs, limited):
    session, call = limited
    with pytest.raises(CellError, match=rf"Slurm job {jobs_of(session)[0]} is TIMEOUT \(TimeLimit\)"):
        call.result(timeout=150)
