"""The datasheet peak of a GPU, by its name."""

from __future__ import annotations

import pytest

from workbench.training.diagnostics.device_use import peak_flops_per_s

TERA_IN_16_BITS = {
    "NVIDIA GH200 480GB": 989,
    "NVIDIA H200": 989,
    "NVIDIA H200 NVL": 835,
    "NVIDIA H100 80GB HBM3": 989,
    "NVIDIA H100 PCIe": 756,
    "NVIDIA A100-SXM4-80GB": 312,
    "NVIDIA A10": 125,
    "NVIDIA L4": 121,
    "NVIDIA L40": 181,
    "NVIDIA L40S": 362,
    "Tesla V100-SXM2-32GB": 125,
    "Tesla V100-PCIE-16GB": 112,
    "Tesla V100S-PCIE-32GB": 130,
    "Tesla T4": 65,
    "NVIDIA GeForce RTX 4090": 165.2,
}
WITHOUT_A_ROW = (
    "NVIDIA A10G",
    "NVIDIA GB200",
    "NVIDIA L40G",
    "NVIDIA RTX A4000",
    "NVIDIA T400",
    "NVIDIA GeForce RTX 3090 Ti",
    "NVIDIA GeForce RTX 4090 D",
    "NVIDIA GeForce RTX 4090 Laptop GPU",
    "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
)


@pytest.mark.parametrize(("name", "tera"), TERA_IN_16_BITS.items())
def test_a_gpu_has_the_peak_of_its_own_row(name: str, tera: float):
    assert peak_flops_per_s(name, "bf16") == pytest.approx(tera * 1e12)


@pytest.mark.parametrize("name", WITHOUT_A_ROW)
def test_a_gpu_whose_name_only_begins_like_another_has_no_peak(name: str):
    assert peak_flops_per_s(name, "bf16") is None
