"""The end of a training job: gradients of its losses, averaged over the mirrored devices, and one step of its update
rule.
"""

from __future__ import annotations

import operator
from functools import reduce
from typing import Any

import torch

from workbench.errors import JobError
from workbench.flow.jobs.context import RunningJob
from workbench.flow.jobs.micro_batches import MicroBatches
from workbench.flow.jobs.settings import FunctionConfig
from workbench.flow.jobs.store import Store
from workbench.flow.optimizer import UpdateRule
from workbench.tensors.global_tensor import GlobalTensor, wrap
from workbench.training import torch_patches  # noqa: F401 - completes GlobalTensor and torch
from workbench.training.saving import optimizers


def clear_gradients(store: Store) -> None:
    """Clear gradients of a call that raised before its step."""
    for variable in store.variables.by_name.values():
        variable.grad = None


def finish(job: RunningJob, config: FunctionConfig) -> None:
    """Backward of the body's losses, and a step.

    Raises:
        JobError: the body has no loss or two update rules, or trains no variable.
    """
    rule = _rule(job, config)
    objective = reduce(operator.add, [_mean(loss) for loss, _ in job.losses])
    if not objective.requires_grad:
        raise JobError(
            f"{job.name}: none of the {len(job.used)} variables of the job leads to its loss, and training needs at "
            "least one. Compute the loss from what layers or get_variable(..., trainable=True) give."
        )
    if job.is_mirrored:
        (objective / job.placement.num_ranks).backward()
        _hand_over_gradients(job)
    else:
        objective.backward()
    optimizer = _optimizer(job, rule)
    step = job.store.num_steps.get(job.name, 0)
    rule.set_rate(optimizer, step)
    if rule.max_norm is not None:
        torch.nn.utils.clip_grad_norm_(_trained(job), rule.max_norm)
    optimizer.step()
    job.store.num_steps[job.name] = step + 1
    clear_gradients(job.store)


def _rule(job: RunningJob, config: FunctionConfig) -> UpdateRule:
    if not job.losses:
        raise JobError(
            f'{job.name}: a job of type "train" that named 0 losses; at least 1 is needed. Call '
            "flow.losses.add_loss(loss) or flow.optimizer.SGD(...).minimize(loss) in its body, or declare it "
            '@flow.global_function(type="predict").'
        )
    rules = [rule for _, rule in job.losses if rule is not None]
    num_ranks = job.store.world.world_size
    if any(rule.max_norm is not None for rule in rules) and job.is_mirrored and job.placement.num_ranks < num_ranks:
        raise JobError(
            f"{job.name}: grad_clipping in a job in the mirrored view on {job.placement.num_ranks} of {num_ranks} "
            "devices. The common norm is asked of all of them: use all, or the consistent view."
        )
    if not rules:
        return config.train.rule(job.name)
    if len(rules) > 1:
        raise JobError(
            f"{job.name}: {len(rules)} calls of optimizer.minimize, and a job has one update rule. Add the losses up "
            "and minimize the sum."
        )
    return rules[0]


def _mean(loss: Any) -> torch.Tensor:
    """Mean over all elements, and over micro-batches."""
    if isinstance(loss, MicroBatches):
        return reduce(operator.add, [part.mean() for part in loss.parts]) / len(loss)
    mean: torch.Tensor = loss.mean()
    return mean


def _hand_over_gradients(job: RunningJob) -> None:
    """Make each device's gradient one term of the variable's gradient; the terms are summed before the step, in
    buckets.
    """
    for name, replica in job.replicas.items():
        if replica.grad is not None:
            variable = job.used[name]
            variable.grad = wrap(replica.grad, variable._spec.dual)


def _trained(job: RunningJob) -> list[GlobalTensor]:
    return [variable for variable in job.used.values() if variable.requires_grad]


def _optimizer(job: RunningJob, rule: UpdateRule) -> torch.optim.Optimizer:
    """The job's optimizer over the variables that it uses. Its first one takes the state of a loaded checkpoint."""
    store, trained = job.store, _trained(job)
    optimizer: torch.optim.Optimizer | None = store.optimizers.get(job.name)
    if optimizer is None or store.rules[job.name] != rule.settings:  # the job may be declared again with another
        made = store.optimizers[job.name] = rule.kind(trained, lr=0.0, **rule.options)
        store.rules[job.name] = rule.settings
        if optimizer is None:
            _load(made, job.name, store)
        return made
    known = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    added = [variable for variable in trained if id(variable) not in known]
    if added:
        optimizer.add_param_group({"params": added})
    return optimizer


_OF_KINDS = {"betas", "alpha"}
"""Hyperparameters by which Adam, RMSprop and SGD differ."""


def _load(optimizer: torch.optim.Optimizer, job: str, store: Store) -> None:
    """Give an optimizer its saved state, if one of its kind was saved. The hyperparameters are those of its rule."""
    checkpoint, part = store.to_load, optimizer_part(job)
    if checkpoint is None or not checkpoint.below(part):
        return
    names = {id(variable): name for name, variable in store.variables.by_name.items()}
    own, saved = [dict(group) for group in optimizer.param_groups], checkpoint.value(part, "param_groups")
    is_of_kind = [_OF_KINDS & group.keys() for group in own] == [_OF_KINDS & group.keys() for group in saved]
    if not is_of_kind or optimizers.problems(optimizer, names, part, checkpoint):
        return  # the saved rule or variables differ, so the optimizer starts without saved state
    filled = dict(optimizers.targets(optimizer, names, part, checkpoint))
    for path, tensor in filled.items():
        checkpoint.read(path, tensor)
    optimizers.assign(optimizer, names, part, checkpoint, filled)
    for group, options in zip(optimizer.param_groups, own, strict=True):
        group.update(options)


def optimizer_part(job: str) -> str:
    """The name of a job's optimizer in a checkpoint."""
    return f"optimizer of {job}"
