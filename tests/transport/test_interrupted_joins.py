"""An interrupt while ranks join a world: all of them go on, or none; nobody waits in C++ for one that has left."""

import threading
from types import SimpleNamespace

import pytest
import torch.distributed as dist
from torch.distributed import distributed_c10d

from tests.timeouts import WAIT_TIMEOUT_S
from workbench.errors import WorldError
from workbench.transport import rendezvous, selection
from workbench.transport.held_interrupt import HeldInterrupt


def interrupted():
    held = HeldInterrupt()
    held.end()
    held._came = True
    return held


def test_a_rank_that_is_interrupted_before_all_are_there_leaves_and_the_others_know_it(tmp_path):
    place, held = f"file://{tmp_path}/store", interrupted()
    with pytest.raises(KeyboardInterrupt):
        rendezvous.join_rendezvous(place, 0, 2, 0, WAIT_TIMEOUT_S, interrupt=held)
    assert not held.has_come
    with pytest.raises(WorldError, match=r"rank 1 of 2 at .*: rank 0 was interrupted before all ranks had joined"):
        rendezvous.join_rendezvous(place, 1, 2, 0, WAIT_TIMEOUT_S)


def test_a_rank_that_waits_in_vain_leaves_as_well(tmp_path):
    place = f"file://{tmp_path}/store"
    with pytest.raises(WorldError, match=r"1 of 2 ranks came within 0\.1 s, ranks \[1\] did not"):
        rendezvous.join_rendezvous(place, 0, 2, 0, 0.1)
    with pytest.raises(WorldError, match=r"rank 0 has waited for 0\.1 s before all ranks had joined"):
        rendezvous.join_rendezvous(place, 1, 2, 0, WAIT_TIMEOUT_S)


def test_all_go_on_or_none_whenever_an_interrupt_comes(tmp_path):
    place, ends = f"file://{tmp_path}/store", set()

    def join(rank, number, held, ended):
        try:
            ended[rank] = rendezvous.join_rendezvous(place, rank, 2, number, WAIT_TIMEOUT_S, interrupt=held).members
        except (KeyboardInterrupt, WorldError) as error:
            ended[rank] = type(error)

    for number in range(40):
        ended, held = {}, HeldInterrupt()
        held.end()
        other = threading.Thread(target=join, args=(0, number, None, ended))
        late = threading.Timer(number * 1e-4, setattr, (held, "_came", True))
        late.start()
        other.start()
        join(1, number, held, ended)
        other.join(WAIT_TIMEOUT_S)
        late.join()
        assert ended[0] == ended[1] or ended == {0: WorldError, 1: KeyboardInterrupt}
        ends.add(ended[0] == ended[1])
    assert True in ends


def test_a_group_is_numbered_as_the_others_number_it_after_one_that_was_interrupted(monkeypatch):
    """torch counts a group before it makes it."""
    place = SimpleNamespace(sub_store=lambda name: dist.PrefixStore(name, dist.HashStore()))

    def make_none(*args, **options):
        raise KeyboardInterrupt

    assert not dist.is_initialized()
    with monkeypatch.context() as patch:
        patch.setattr(distributed_c10d, "_new_process_group_helper", make_none)
        with pytest.raises(KeyboardInterrupt):
            selection.open_group("gloo", place, 0, 1, WAIT_TIMEOUT_S)
    try:
        selection.open_group("gloo", place, 0, 1, WAIT_TIMEOUT_S)
        assert dist.group.WORLD.group_name == "0"
    finally:
        dist.destroy_process_group()


def test_an_interrupt_long_after_a_held_one_is_raised_at_once():
    with pytest.raises(KeyboardInterrupt), HeldInterrupt(at_most_s=0.0) as held:
        held._note(2, None)
    with HeldInterrupt(at_most_s=WAIT_TIMEOUT_S) as held:
        held._note(2, None)
        held._note(2, None)
        assert held.take()
