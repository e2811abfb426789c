"""Kernels run in Triton's interpreter on the CPU, or compiled on a GPU (marker gpu)."""

import pytest

from workbench.kernels import launch


@pytest.fixture(params=["interpreter", pytest.param("compiled", marks=pytest.mark.gpu)])
def device(request, monkeypatch):
    """The device of a kernel; the root conftest selects the interpreter where there is no GPU."""
    if not launch.has_triton():
        pytest.skip("Triton is not installed (it exists for Linux only)")
    if (request.param == "interpreter") != launch.is_interpreted():
        pytest.skip(
            "kernels run compiled here (TRITON_INTERPRET=1 chooses the interpreter of Triton 3.7), or the other way"
        )
    monkeypatch.setattr(launch, "requested", "triton")
    return "cpu" if request.param == "interpreter" else "cuda"
