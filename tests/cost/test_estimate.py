"""Estimates of small models, against sums that are done here by hand."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from workbench.core.model_costs import Extent, LayerCost, ModelCosts, OpCost
from workbench.core.rows import Layer
from workbench.core.strategy import Strategy
from workbench.cost.estimate import Estimate, estimate
from workbench.cost.hardware import Hardware, Link
from workbench.cost.software import WORKBENCH
from workbench.errors import StrategyError

WIDTH = 64
MACHINE = Hardware(
    "paper", memory_bytes=1e9, memory_bandwidth_bytes_per_s=1e9, matmul_flops_per_s={"fp32": 1e6}, matmul_half_size=0.0,
    op_s=0.0, links=(Link(4, 0.0, 1e4), Link(1000, 0.0, 1e3)),
)  # fmt: skip
"""So slow at products and exchanges that memory does not count."""


def mlp(num_layers: int) -> ModelCosts:
    rows = []
    for index in range(num_layers):
        layer = Layer(f"fc{index}", "Linear", {"weight": (WIDTH, WIDTH)}, WIDTH * WIDTH)
        own = OpCost("linear", 2 * WIDTH * WIDTH, 8 * WIDTH, inner=WIDTH, saved_bytes=4 * WIDTH)
        rows.append(LayerCost(layer, (own,), (), Extent((WIDTH,)), 4))
    return ModelCosts(tuple(rows), (WIDTH,))


def predict(text: str, num_ranks: int, num_layers: int = 4, batch_size: int = 32, **options: bool) -> Estimate:
    model = mlp(num_layers)
    return estimate(model, Strategy(text).resolve(model.layers, num_ranks), MACHINE, batch_size, **options)


def product_s(samples: float) -> float:
    return 2 * WIDTH * WIDTH * samples / 1e6


def test_one_rank_computes_three_products_for_each_layer() -> None:
    found = predict("data", 1)
    assert found.compute_s == pytest.approx(4 * 3 * product_s(32))
    assert found.boxing_s == found.gradient_s == found.bubble_s == found.boxed_bytes == 0
    assert found.memory[0]["parameters"] == 4 * 4 * WIDTH * WIDTH
    assert found.memory[0]["optimizer"] == 8 * 4 * WIDTH * WIDTH
    assert found.memory[0]["gradients"] == 4 * 4 * WIDTH * WIDTH  # while the optimizer steps: activations are gone
    assert (found.memory[0]["activations"], found.memory[0]["buffers"]) == (0, 4 * 4 * WIDTH * WIDTH)


def test_products_go_through_operands_that_no_cache_holds() -> None:
    """Weights are read forward and for the input, and their gradient written, which moves it twice."""
    model, slow = mlp(1), 1e5
    weight_s, rows_s = 4 * WIDTH * WIDTH / slow, 32 * 8 * WIDTH / slow
    found = {}
    for text, ranks in (("data", 1), ("model", 2), ("data | mb=4", 1)):
        machine = replace(MACHINE, weight_bytes_per_s=slow)
        resolved = Strategy(text).resolve(model.layers, ranks)
        estimates = [estimate(model, resolved, hardware, 32) for hardware in (MACHINE, machine)]
        found[text] = estimates[1].compute_s - estimates[0].compute_s
    assert found["data"] == pytest.approx(4 * weight_s + 3 * rows_s)
    assert found["model"] == pytest.approx(
        (4 * weight_s + 3 * rows_s) / 2
    )  # of half the weight, and half of the columns
    assert found["data | mb=4"] == pytest.approx(4 * 4 * weight_s + 3 * rows_s)  # weights once more per micro-batch


@pytest.mark.parametrize("m", [1, 2, 8])
def test_all_micro_batches_but_the_first_add_to_gradients(m: int) -> None:
    machine = replace(MACHINE, memory_bandwidth_bytes_per_s=1e3, matmul_flops_per_s={"fp32": 1e30})
    model = mlp(1)
    model = replace(model, rows=(replace(model.rows[0], own=(OpCost("linear", 1.0, 0.0, inner=WIDTH),)),))
    found = estimate(model, Strategy(f"data | mb={m}").resolve(model.layers, 1), machine, 32)
    assert found.compute_s == pytest.approx((m - 1) * 3 * 4 * WIDTH * WIDTH / 1e3)


def test_parts_add_up() -> None:
    for text, ranks in (("data", 4), ("model", 4), ("fc[0-1]: model@0; fc[2-3]: data@1 | 2x1x2 mb=4 1f1b", 4)):
        found = predict(text, ranks)
        parts = found.compute_s + found.boxing_s + found.gradient_s + found.bubble_s + found.optimizer_s
        assert found.step_s == pytest.approx(parts)
        assert found.samples_per_s == pytest.approx(32 / found.step_s)


def test_data_parallel_ranks_sum_gradients() -> None:
    found = predict("data", 4)
    received = 2 * 3 / 4 * 4 * 4 * WIDTH * WIDTH
    assert found.boxed_bytes == pytest.approx(4 * received)
    assert found.compute_s == pytest.approx(4 * 3 * product_s(8))


@pytest.mark.parametrize(("options", "exchanges"), [("", 1), ("zero=1", 2), ("zero=2 mb=2", 3), ("zero=3", 3 * 4)])
def test_ranks_that_copy_by_themselves_hide_no_sums_and_start_each(options: str, exchanges: int) -> None:
    """A bucket there and, of parameters, one back; under ZeRO 3 every layer gathered twice and scattered once."""
    model, latency_s = mlp(4), 7.0
    resolved = Strategy(f"data | 1x2x1 {options}").resolve(model.layers, 2)
    found = []
    for latency in (0.0, latency_s):
        link = Link(1024, latency, 1e9)
        machine = replace(MACHINE, links=(link,), exchanges_on_cores=True)
        found.append(estimate(model, resolved, machine, 32).gradient_s)
    assert found[1] - found[0] == pytest.approx(exchanges * latency_s)
    hides = replace(MACHINE, links=(Link(1024, 0.0, 1e9),), memory_bandwidth_bytes_per_s=1e12)
    hiding = estimate(model, resolved, hides, 32)
    assert found[0] > hiding.gradient_s


def test_what_backward_moves_counts_where_it_is_known() -> None:
    """As counted; of a formula, 1.5 times what forward moves. A product's is besides its products."""
    machine = replace(MACHINE, memory_bandwidth_bytes_per_s=1e3, matmul_flops_per_s={"fp32": 1e30})

    def seconds(*works: OpCost) -> float:
        model = replace(mlp(1), rows=(replace(mlp(1).rows[0], own=works),))
        return estimate(model, Strategy("data").resolve(model.layers, 1), machine, 1).compute_s

    assert seconds(OpCost("gelu", 0, 100.0)) == pytest.approx(0.25)
    assert seconds(OpCost("gelu", 0, 100.0, backward_bytes=400.0)) == pytest.approx(0.5)
    assert seconds(OpCost("linear", 1.0, 0.0, WIDTH, backward_bytes=400.0)) == pytest.approx(0.4)
    assert seconds(OpCost("split", 0, 0.0, backward_bytes=400.0)) == pytest.approx(0.4)


def test_column_and_row_pairs_exchange_once_forward_and_once_back() -> None:
    found = predict("model", 2, num_layers=2)
    whole = 4 * WIDTH * 32
    # the sums of the last row-split layer go to S(0), as what leaves the model does; backward gathers them
    assert found.boxed_bytes == pytest.approx(2 * (whole / 2 + whole / 2))
    assert found.compute_s == pytest.approx(2 * 3 * product_s(32) / 2)
    assert found.memory[0]["parameters"] == 2 * 4 * WIDTH * WIDTH / 2


def test_stages_wait_for_each_other() -> None:
    found = predict("fc[0-1]: data@0; fc[2-3]: data@1 | 2x1x1 mb=4 1f1b", 2, with_timeline=True)
    work = 3 * 2 * product_s(8)
    assert found.compute_s == pytest.approx(4 * work, rel=1e-3)  # and gradients are added up
    assert found.bubble_s > work
    assert found.timeline is not None
    assert found.timeline.makespan_s == pytest.approx(found.compute_s + found.boxing_s + found.bubble_s)
    assert found.memory[0]["activations"] == 2 * found.memory[1]["activations"]


@pytest.mark.parametrize(("widths", "samples"), [("1x1+2x1", (32, 16)), ("2x1+1x1", (16, 32)), ("2x1+2x1", (16, 16))])
def test_a_transfer_takes_as_long_as_at_its_busier_end(widths: str, samples: tuple[int, int]) -> None:
    found = predict(f"fc[0-1]: data@0; fc[2-3]: data@1 | {widths}", sum(int(width[0]) for width in widths.split("+")))
    hop_s = 4 * WIDTH * max(samples) / 1e4
    makespan = found.compute_s + found.boxing_s + found.bubble_s
    assert makespan == pytest.approx(2 * hop_s + 3 * 2 * sum(map(product_s, samples)), rel=1e-3)


def test_a_weight_of_another_stage_is_sent_for_each_micro_batch_and_kept_for_its_backward() -> None:
    plain = mlp(2)
    head = replace(plain.rows[1], layer=replace(plain.rows[1].layer, tied_to="fc0"))
    found = {}
    for name, model in (("plain", plain), ("tied", replace(plain, rows=(plain.rows[0], head)))):
        resolved = Strategy("fc0: data@0; fc1: data@1 | 2x1x1 mb=4").resolve(model.layers, 2)
        found[name] = estimate(model, resolved, MACHINE, 32, software=replace(WORKBENCH, keeps_gradients=True))
    whole = 4 * WIDTH * WIDTH
    assert found["tied"].sent.activations - found["plain"].sent.activations == pytest.approx(4 * 2 * whole)
    assert found["tied"].boxing_s == pytest.approx(4 * 2 * whole / 1e4)
    assert found["tied"].gradient_s == 0
    kept = [found[name].memory[1]["activations"] for name in ("plain", "tied")]
    assert kept[1] - kept[0] >= whole


def test_the_timeline_of_ranks_that_share_cores_is_as_long_as_its_parts() -> None:
    model, shared = mlp(4), replace(MACHINE, alone_speedup=2.0)
    resolved = Strategy("fc[0-1]: data@0; fc[2-3]: data@1 | 2x1x1 mb=4 1f1b").resolve(model.layers, 2)
    found = estimate(model, resolved, shared, 32, with_timeline=True)
    assert found.timeline is not None
    assert found.timeline.makespan_s == pytest.approx(found.compute_s + found.boxing_s + found.bubble_s)
    assert found.timeline.makespan_s < predict("fc[0-1]: data@0; fc[2-3]: data@1 | 2x1x1 mb=4 1f1b", 2).step_s
    for spans in found.timeline.spans:
        assert len(spans) == 8 and all(one.stop_s <= two.start_s + 1e-9 for one, two in pairwise(spans))


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_zero_divides_one_kind_after_the_other(zero: int) -> None:
    kinds = predict(f"data | zero={zero}", 4).memory[0]
    whole = 4 * 4 * WIDTH * WIDTH
    assert kinds["parameters"] == whole / (4 if zero >= 3 else 1)
    assert kinds["optimizer"] == 2 * whole / (4 if zero >= 1 else 1)
    software = replace(WORKBENCH, keeps_gradients=True)
    model = mlp(4)
    kept = estimate(model, Strategy(f"data | zero={zero}").resolve(model.layers, 4), MACHINE, 32, software=software)
    assert kept.memory[0]["gradients"] == whole / (4 if zero >= 2 else 1)


def test_recomputed_layers_keep_their_input_and_run_again() -> None:
    plain, again = predict("data", 1), predict("data | recompute", 1)
    assert again.compute_s == pytest.approx(plain.compute_s * 4 / 3)


def test_a_batch_of_fewer_samples_than_micro_batches_is_an_error() -> None:
    with pytest.raises(StrategyError, match=r"batch_size=2: 4 micro-batches; each takes at least one sample"):
        predict("data | mb=4", 4, batch_size=2)


def test_uneven_shares_take_as_long_as_the_largest() -> None:
    assert predict("data", 4, batch_size=10).compute_s == predict("data", 4, batch_size=12).compute_s


def test_a_precision_without_a_rate_is_an_error() -> None:
    with pytest.raises(StrategyError, match="precision bf16: hardware 'paper' has matmul_flops_per_s of fp32 only"):
        predict("data | bf16", 1)


def test_layers_that_the_model_axis_shares_sum_their_gradients_over_it_too() -> None:
    """On 2 x 2 ranks a data-parallel layer sees other samples on each of the four."""
    whole = 4 * WIDTH * WIDTH
    found = predict("*: data | 1x2x2", 4, num_layers=1)
    assert found.boxed_bytes == pytest.approx(4 * 2 * 3 / 4 * whole)
    assert predict("*: data | 1x2x2 zero=1", 4, num_layers=1).memory[0]["optimizer"] == 2 * whole / 4


def test_state_in_8_bits_takes_a_quarter_and_scales() -> None:
    model, text = mlp(2), Strategy("*: data")
    whole, eight = (
        estimate(model, text.resolve(model.layers, 1), MACHINE, 8, optimizer=name) for name in ("adamw", "adamw8bit")
    )
    assert eight.memory[0]["optimizer"] == whole.memory[0]["optimizer"] * (2 + 8 / 256) / 8
    assert eight.step_s < whole.step_s
