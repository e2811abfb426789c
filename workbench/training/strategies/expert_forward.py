"""The forward of fused experts on shards.

Experts that are whole on each rank run on the rank's own tokens. Others are split by their number. On the model axis
all ranks have the same tokens: each computes the terms of its own experts, and the result is a partial sum. On the data
axis ranks have different tokens: each token goes to the ranks of the experts that it has chosen, by an all-to-all whose
sizes depend on the choices, and the results come back to the token. No token is dropped. Results are multiplied by
their weights where the token is, so the weights do not travel.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import islice
from math import prod
from typing import Any

import torch
from torch import nn

from workbench.core.expert_group import ExpertGroup, expert_groups
from workbench.core.sbp import Split, broadcast, partial_sum
from workbench.core.strategy import ResolvedLayer
from workbench.errors import ExplicitBoxingError
from workbench.tensors.boxing.box import box_implicitly
from workbench.tensors.boxing.uneven import RowExchange, exchange_rows
from workbench.tensors.copy_to_device import copy_to_device
from workbench.tensors.dispatch.local_map import plain_alias
from workbench.tensors.dispatch.placeholder_calls import has_data, placeholder_outputs
from workbench.tensors.global_tensor import GlobalTensor, Spec, local_torch, spec_of, wrap
from workbench.training.strategies.fused_experts import argument_names, run_some
from workbench.training.strategies.layouts import LayoutsInUse
from workbench.training.strategies.opaque_call import opaque_call


class ExpertForward:
    """The forward of a layer of fused experts, in the place of the module's own until ``remove``.

    A call whose arguments are not tokens, numbers of experts and weights runs the module's own forward, by the rules of
    its functions.
    """

    runs_some_experts = True

    def __init__(self, module: nn.Module, in_use: LayoutsInUse, choice: ResolvedLayer, experts: int) -> None:
        self._module, self._in_use, self._choice, self._experts = module, in_use, choice, experts
        self._names = argument_names(module)[:3]
        module.forward = self

    def remove(self) -> None:
        """Give the module its own forward back."""
        if self._module.__dict__.get("forward") is self:
            del self._module.__dict__["forward"]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        given = [*args, *(kwargs[name] for name in self._names[len(args) :] if name in kwargs)]
        if len(args) + len(kwargs) != len(given) or not _are_choices_of_tokens(given):
            return type(self._module).forward(self._module, *args, **kwargs)
        plan, choice = self._in_use.layouts.plan, self._choice
        data, model = plan.resolved.stage_width(choice.stage)
        is_whole = choice.split is None or choice.over_data * model == 1
        on_model = (broadcast, partial_sum) if choice.split else (Split(0), Split(0))
        layout, terms = (plan.layout(choice.stage, Split(0), entry, context=Split(0)) for entry in on_model)
        tokens, numbers, weights = (box_implicitly(tensor, layout, choice.name) for tensor in given)
        plan.chosen[choice.name] = numbers._spec.shape[-1]
        parameters: dict[str, Any] = {name: p for name, p in self._module._parameters.items() if p is not None}
        world = tokens._spec.world
        if choice.over_data > 1 and not world.context.implicit_boxing_allowed:
            raise ExplicitBoxingError(
                f"{choice.name}: tokens go to experts on other ranks and come back, exchanges that the code does not "
                "write. Under wb.debug.explicit_boxing() these experts need a row 'data' or 'model'."
            )
        spec = spec_of(world, terms, tokens._spec.shape)
        tag = world.context.next_tag() if choice.over_data > 1 else 0
        if spec.is_placeholder:
            return _placeholder(spec, [tokens, weights, *parameters.values()])
        groups = expert_groups(plan.placements[choice.stage], data, model, choice.over_data, self._experts)
        with local_torch():
            given = [plain_alias(tensor) for tensor in (tokens, numbers, weights, *parameters.values())]
            names = tuple(parameters)
            call = None if is_whole else _Call(choice.name, groups, numbers._spec, tag)

            def run(rows: torch.Tensor, own: torch.Tensor, factors: torch.Tensor, *held: torch.Tensor) -> torch.Tensor:
                results = partial(self._terms, dict(zip(names, held, strict=True)))
                return results(rows, own, factors) if call is None else call.run(rows, own, factors, results)

            local = opaque_call(world, f"experts {choice.name}", run, given)
        return wrap(local, spec)

    def _terms(
        self, tensors: Mapping[str, torch.Tensor], rows: torch.Tensor, numbers: torch.Tensor, weights: torch.Tensor
    ) -> Any:
        """What this rank's experts give for rows: the sum over those that each has chosen, times their weights.

        Under autocast too the results have the rows' dtype: they travel between ranks, some of which had no row.
        """
        if not len(rows) or not has_data(rows):  # backward reaches the same parameters as on other ranks
            return rows + sum(tensor.flatten()[:0].sum() for tensor in (weights, *tensors.values()))
        results = run_some(self._module, self._experts, tensors, rows, numbers, weights)
        return results.to(rows.dtype)


def _are_choices_of_tokens(given: Sequence[Any]) -> bool:
    """Whether arguments are global tokens, numbers of experts for each and as many weights."""
    if len(given) != 3 or not all(isinstance(each, GlobalTensor) for each in given):
        return False
    _, numbers, weights = given
    shapes = [tuple(each.shape) for each in given]
    are_numbers = not numbers.is_floating_point() and weights.is_floating_point()
    return are_numbers and len(shapes[0]) > 1 and shapes[0][:-1] == shapes[1][:-1] and shapes[1] == shapes[2]


def _placeholder(spec: Spec, operands: list[GlobalTensor]) -> GlobalTensor:
    """The result on a rank of another stage."""
    links = torch.is_grad_enabled() and any(operand.requires_grad for operand in operands)
    info = (tuple(spec.shape), operands[0].dtype, links)
    return wrap(placeholder_outputs([info], operands, spec.world.device)[0], spec)


class _Call:
    """One call on this rank's shards.

    Args:
        name: the layer's path.
        groups: the group of every rank of the stage.
        spec: of the numbers of the chosen experts.
        tag: of the exchanges, where the group has several ranks.
    """

    def __init__(self, name: str, groups: Mapping[int, ExpertGroup], spec: Spec, tag: int) -> None:
        self.name, self.groups, self.spec, self.tag = name, groups, spec, tag
        self.group = groups[spec.world.rank]
        self.place = self.group.ranks.index(spec.world.rank)

    def run(
        self,
        tokens: torch.Tensor,
        numbers: torch.Tensor,
        weights: torch.Tensor,
        terms: Callable[..., torch.Tensor],
    ) -> torch.Tensor:
        """The weighted sum, for each of this rank's tokens, of the results of its experts of this group.

        Args:
            tokens: (tokens..., features).
            numbers, weights: (tokens..., chosen experts).
            terms: (rows, one number for each of this rank's experts, weights) -> results.
        """
        rows, flat = tokens.flatten(0, -2), weights.flatten()
        order, counts = self._choices(numbers.flatten())
        asking = self._ask(counts) if len(self.group.ranks) > 1 else counts[None]
        sent, received = self._numbers_of_rows(len(numbers.flatten()), counts, asking)
        chosen = order[: sum(sent)]
        of_token = chosen // numbers.shape[-1]
        taken = rows.index_select(0, of_token)  # whose backward adds rows, faster than that of rows[of_token]
        exchange = self._exchange(sent, received, None if has_data(counts) else self._even)
        arrived = exchange_rows(taken, exchange) if len(sent) > 1 else taken
        results = terms(arrived, _numbers(asking, sum(received))[:, None], flat.new_ones(len(arrived), 1))
        if len(sent) > 1:
            results = exchange_rows(results, exchange.reversed())
        weighted = results * flat.index_select(0, chosen)[:, None]
        total = weighted.new_zeros(rows.shape).index_add_(0, of_token, weighted)
        return total.to(tokens.dtype).view(tokens.shape)

    def _choices(self, numbers: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The places of the choices, those of this group's experts first and sorted by expert, and how many each expert
        has: known to the device only.

        A number that is no expert's chooses none.
        """
        group, num_own = self.group, sum(self.group.sizes)
        if not has_data(numbers):
            return torch.empty_like(numbers), numbers.new_empty(num_own)
        own_number = torch.full((group.experts + 1,), num_own)
        own_number[[expert for start, stop in group.bounds for expert in range(start, stop)]] = torch.arange(num_own)
        own = copy_to_device(own_number, numbers.device)[numbers.clamp(-1, group.experts)]
        own, order = own.sort(stable=True)
        ends = torch.searchsorted(own, torch.arange(num_own + 1, device=own.device))
        return order, ends.diff()

    def _ask(self, counts: torch.Tensor) -> torch.Tensor:
        """How many rows each rank of the group has for each expert here, from how many this one has for all."""
        sizes, own = self.group.sizes, self.group.sizes[self.place]
        asked = self._exchange(sizes, (own,) * len(sizes), lambda rank, place: self.groups[rank].sizes[place])
        return exchange_rows(counts, asked).view(len(sizes), own)

    def _numbers_of_rows(
        self, num_choices: int, counts: torch.Tensor, asking: torch.Tensor
    ) -> tuple[Sequence[int], Sequence[int]]:
        """How many rows go to each rank of the group, and come from it: the one thing that the host waits for.

        Without data, all experts are chosen alike often.
        """
        sizes = self.group.sizes
        if not has_data(counts):
            sent = [self.group.even_choices(num_choices, place) for place in range(len(sizes))]
            return sent, [self._even(rank, self.place) for rank in self.group.ranks]
        numbers = iter(torch.cat([counts, asking.sum(1)]).tolist())
        return [sum(islice(numbers, size)) for size in sizes], list(numbers)

    def _even(self, rank: int, place: int) -> int:
        """Rows from ``rank`` to the rank at ``place`` of its group, without data."""
        choices = prod(self.spec.layout.local_shape(self.spec.shape, rank))
        return self.groups[rank].even_choices(choices, place)

    def _exchange(
        self, sent: Sequence[int], received: Sequence[int], known: Callable[[int, int], int] | None = None
    ) -> RowExchange:
        """An exchange of rows. ``known``: the rows that any rank sends to a place of its group, known to all ranks: a
        trace has those of all.
        """
        spec, of_all = self.spec, dict[int, tuple[int, int]]()
        if known is not None and spec.world.context.tracer is not None:
            for other, group in self.groups.items():
                at = group.ranks.index(other)
                rows_sent = sum(known(other, place) for place in range(len(sent)) if place != at)
                of_all[other] = rows_sent, sum(known(each, at) for each in group.ranks if each != other)
        return RowExchange(
            spec.world, self.group.ranks, tuple(sent), tuple(received), of_all, spec.layout, spec.shape, self.tag,
            self.name,
        )  # fmt: skip


def _numbers(counts: torch.Tensor, total: int) -> torch.Tensor:
    """The numbers of a rank's experts, each as often as counts say: (experts) or (ranks, experts) of them.

    >>> _numbers(torch.tensor([2, 0, 1]), total=3)
    tensor([0, 0, 2])
    """
    if not has_data(counts):
        return counts
    numbers = torch.arange(counts.shape[-1], device=counts.device).expand(counts.shape)
    return numbers.flatten().repeat_interleave(counts.flatten(), output_size=total)
