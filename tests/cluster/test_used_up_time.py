"""A cell ends with the time limit of its Slurm job."""

import pytest

from tests.cluster.slurm import NEEDS_SLURM, jobs_of
from workbench.errors import CellError

pytestmark = NEEDS_SLURM


def test_a_cell_ends_with_the_time_limit_of_its_job(submits_jobs, limited):
    session, call = limited
    with pytest.raises(CellError, match=rf"Slurm job {jobs_of(session)[0]} is TIMEOUT \(TimeLimit\)"):
        call.result(timeout=150)
