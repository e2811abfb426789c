"""One line that starts engines elsewhere: the profile that it writes, and mistakes that are named together."""

import dataclasses
import os
import re
import socket
import sys
from argparse import Namespace

import pytest
from IPython.core.error import UsageError
from IPython.utils.text import EvalFormatter
from traitlets.config.loader import PyFileConfigLoader

from workbench.errors import SessionError
from workbench.session import Session, magic_commands
from workbench.session.processes import make_profile, ssh
from workbench.session.processes.host_facts import ask_hosts, parse_hosts
from workbench.session.protocol import RankActivity

SSH = """#!/bin/sh
# Hosts by name: what ssh says for each.
for word; do
    case "$word" in
        good*|*@good*) export SSH_CONNECTION="127.0.0.1 50000 127.0.0.1 22"; shift $(($#-1)); exec sh -c "$1" ;;
        unknown) echo "ssh: Could not resolve hostname unknown: Name or service not known" >&2; exit 255 ;;
        nokey) echo "nokey: Permission denied (publickey)." >&2; exit 255 ;;
        off) echo "ssh: connect to host off port 22: Connection timed out" >&2; exit 255 ;;
        closed) echo "ssh: connect to host closed port 22: Connection refused" >&2; exit 255 ;;
        new) echo "Host key verification failed." >&2; exit 255 ;;
        latin) printf 'gesch\\374tzt\\n' >&2; exit 255 ;;
    esac
done
"""


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """Programs of another machine, and an IPython folder of the test's own."""
    folder = tmp_path / "bin"
    folder.mkdir()
    fails = "#!/bin/sh\nexit 3\n"
    for name, text in {"ssh": SSH, "sbatch": "#!/bin/sh\n", "sinfo": fails, "old": fails}.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    return folder


def read(made):
    return PyFileConfigLoader(made.path.name, str(made.path.parent)).load_config()


def test_a_profile_for_hosts(elsewhere):
    made = make_profile.ssh_profile("good", 5)
    config = read(made)
    assert config.SSHEngineSetLauncher.engines == {"good": 5} and config.Cluster.n == made.num_engines == 5
    assert config.SSHLauncher.remote_python == sys.executable and config.Cluster.controller_ip == "127.0.0.1"
    assert made.path.parent.name == "profile_workbench-good" and "--profile workbench-good" in str(made)
    assert str(made.path) in str(made) and "5 on good" in str(made)
    assert make_profile.ssh_profile("good").num_engines in (2, len(ask_hosts(["good"])[0].gpus))


def test_other_hosts_get_another_profile(elsewhere):
    """The second start wrote over the first one's profile, and `Again:` started engines on other hosts."""
    gpus = [f"good{number:02}.cluster.uni.edu" for number in range(1, 10)]
    lists = [["good1"], gpus[:4], gpus[:3] + gpus[8:], ["me@good1"], ["you@good1"], ["good1:22"], ["good-1"]]
    lists += [["good.1"], ["good1", "good2"], ["good1-good2"]]
    made = [make_profile.ssh_profile(",".join(hosts), 8) for hosts in lists]
    assert len({each.name for each in made}) == len(made)
    assert made[0].name == "workbench-good1" and made[0] == make_profile.ssh_profile("good1", 8)
    assert all(each.name.startswith("workbench-good") and len(each.name) < 60 for each in made)
    for each, hosts in zip(made, lists, strict=True):
        assert set(read(each).SSHEngineSetLauncher.engines) == set(hosts)
        assert each.path.parent.name == f"profile_{each.name}" and f"--profile {each.name}" in str(each)
    options = ["nodes=2", "nodes=4", "partition=a-b", "partition=a.b", "partition=a-b nodes=2"]
    jobs = [make_profile.slurm_profile(text, 4) for text in options]
    assert len({each.name for each in jobs}) == len(jobs)
    for each in jobs:
        assert str(each.path.parent) in read(each).SlurmEngineSetLauncher.batch_file_name


def test_a_profile_that_is_not_there_is_refused_and_not_made(elsewhere, tmp_path):
    """ipyparallel made it, and two engines ran on this machine."""
    made = make_profile.ssh_profile("good", 2)
    with pytest.raises(SessionError, match=r"no folder profile_workbench-godo in .*did you mean 'workbench-good'\?"):
        Session(profile="workbench-godo")
    assert [path.name for path in made.path.parents[1].iterdir()] == ["profile_workbench-good"]


def test_a_home_that_cannot_be_written_is_an_error(elsewhere, monkeypatch, tmp_path):
    """IPython made a temporary folder at each question, and the profile was not in the next one."""
    (tmp_path / "file").touch()
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "file" / "ipython"))
    for start in (lambda: make_profile.ssh_profile("good", 2), lambda: Session(profile="workbench-good")):
        with pytest.raises(SessionError, match=r"IPython parent '.*file' is not a writable location, .*set IPYTHONDIR"):
            start()


def test_a_host_may_speak_another_encoding(elsewhere):
    assert ssh.why_silent(["ssh"], "latin") == "gesch\ufffdtzt"


def test_all_hosts_that_cannot_run_engines_are_named_with_their_fixes(elsewhere):
    with pytest.raises(SessionError) as caught:
        make_profile.ssh_profile("good,unknown,nokey,off,closed,new", 8)
    lines = str(caught.value).splitlines()
    fixes = {line.split(":")[0].strip(): line.partition(" -> ")[2] for line in lines if " -> " in line}
    assert set(fixes) == {"unknown", "nokey", "off", "closed", "new"}
    assert fixes["nokey"] == "Let your key in: ssh-copy-id nokey" and "Start sshd there" in fixes["closed"]
    assert "~/.ssh/config" in fixes["unknown"] and "firewall" in fixes["off"] and "once by hand" in fixes["new"]
    assert lines[-1] == "All checks: workbench doctor --hosts good,unknown,nokey,off,closed,new"


@pytest.mark.parametrize(
    ("python", "problem"),
    [
        ("/nowhere/python", "no Python at /nowhere/python -> .*--python PATH"),
        ("old", "old does not run: exit status 3"),
    ],
)
def test_a_python_that_cannot_run(elsewhere, python, problem):
    with pytest.raises(SessionError, match=problem):
        make_profile.ssh_profile("good", 2, python)


def test_hosts_are_asked_by_the_protocol_that_engines_use(elsewhere):
    """ssh prefers IPv6. A host that has both was said to be behind a firewall: this machine listens on IPv4."""
    (elsewhere / "ssh").write_text(
        SSH.replace("for word", 'case "$*" in *AddressFamily=inet*) ;; *) exit 255 ;; esac\nfor word')
    )
    assert make_profile.ssh_profile("good", 2).num_engines == 2


@pytest.mark.parametrize(("nodes", "address"), [(["here", "far"], "10.0.0.2"), (["here"], "127.0.0.1"), ([], "*")])
def test_the_controller_listens_towards_another_node(elsewhere, monkeypatch, nodes, address):
    """A machine's own name may lead to its loopback, as in Debian's /etc/hosts: engines elsewhere found nothing."""
    (elsewhere / "sinfo").write_text("#!/bin/sh\n" + "".join(f"echo {node}\n" for node in nodes))
    monkeypatch.setattr(make_profile.socket, "gethostbyname", {"here": "127.0.1.1", "far": "10.0.0.9"}.__getitem__)
    towards = {"127.0.1.1": "127.0.0.1", "10.0.0.9": "10.0.0.2"}
    monkeypatch.setattr(make_profile, "address_towards", towards.__getitem__)
    assert read(make_profile.slurm_profile("nodes=2", 4)).Cluster.controller_ip == address


def test_other_versions_and_a_port_that_is_closed(elsewhere, monkeypatch):
    facts = ask_hosts(["good"])[0]
    assert facts.back == "" and abs(facts.clock_s) < 10 and facts.port and not make_profile._problems(facts)
    monkeypatch.setattr(make_profile.sys, "version_info", (3, 14))
    monkeypatch.setattr(make_profile, "_own_version", lambda name: "9.9" if name == "torch" else "")
    problems = make_profile.environment_problems(facts)
    assert "here 3.14" in problems[0][0] and "pip install torch==9.9" in problems[1][1]
    closed = dataclasses.replace(facts, back="timed out")
    assert "cannot connect to this machine at 127.0.0.1: timed out -> Open TCP" in make_profile._problems(closed)[-1]


@pytest.mark.parametrize(
    ("text", "mistake"),
    [
        ("", "no host is named"),
        ("a,b,a", "a is named twice"),
        ("a b,-oX", "'a b' is no host; '-oX' is no host"),
        ("a:x", "'a:x' is no host"),
    ],
)
def test_hosts_that_cannot_be(text, mistake):
    with pytest.raises(SessionError, match=re.escape(mistake)):
        parse_hosts(text, "--hosts")


def test_a_profile_for_slurm_asks_for_what_a_set_of_engines_needs(elsewhere):
    """All engines at first; later one more, which must not get two nodes."""
    options = "partition=gpu nodes=2 gpus-per-node=a100:8 time=01:00:00\n --exclusive comment='{cluster_id}; id'"
    made = make_profile.slurm_profile(options)
    config = read(made)
    assert config.Cluster.n == made.num_engines == 16 and re.fullmatch("workbench-slurm-gpu-[0-9a-f]{6}", made.name)
    template = config.SlurmEngineSetLauncher.batch_template

    def asks(n):
        given = {"n": n, "cluster_id": "c", "output_file": "o", "program_and_args": "python -m ipyparallel.engine"}
        return EvalFormatter().format(template, **given).splitlines()

    whole, one = asks(16), asks(1)
    assert {"#SBATCH --nodes=2", "#SBATCH --ntasks=16", "#SBATCH --ntasks-per-node=8"} <= set(whole)
    assert {"#SBATCH --gpus-per-node=a100:8", "#SBATCH --partition=gpu", "#SBATCH --exclusive"} <= set(whole)
    assert "#SBATCH --comment='{cluster_id}; id'" in whole
    assert {"#SBATCH --nodes=1", "#SBATCH --ntasks=1", "#SBATCH --gpus-per-node=a100:1"} <= set(one)
    assert whole[-1] == "srun --no-kill --kill-on-bad-exit=0 python -m ipyparallel.engine"
    assert make_profile.slurm_profile("nodes=2 gpus-per-node=8", 4).num_engines == 4


@pytest.mark.parametrize(
    ("text", "engines", "mistakes"),
    [
        (
            "partiton=gpu nodes=two nodes=2",
            4,
            ["'partiton' is no option here, did you mean 'partition'?", "nodes=two", "nodes is there twice"],
        ),
        ("partition nodes=2 gpus-per-node=all", 4, ["partition has no value", "gpus-per-node=all"]),
        ("partition=gpu nodes=2", None, ["how many engines?"]),
        ("nodes=2 gpus-per-node=2", 8, ["8 engines, but 2 nodes of 2 are 4"]),
        ("nodes=2 cpus-per-task='4; id'", 2, ["cpus-per-task=4; id: it is a number from 1"]),
        ("nodes=1 'comment=a\nid'", 2, [r"comment='a\nid': a value is one line"]),
        ("nodes=1 comment='a", 2, ["No closing quotation"]),
    ],
)
def test_mistakes_in_options_of_slurm_are_named_together(elsewhere, monkeypatch, text, engines, mistakes):
    with pytest.raises(SessionError) as caught:
        make_profile.slurm_profile(text, engines)
    assert all(mistake in str(caught.value) for mistake in mistakes), caught.value
    monkeypatch.setenv("PATH", "")
    with pytest.raises(SessionError, match="no sbatch here"):
        make_profile.slurm_profile(text, engines)


def test_options_that_exclude_each_other(no_session):
    given = Namespace(engines=2, profile="p", hosts="a", slurm=None, python="x", device="cpu", keep=True, new=True)
    with pytest.raises(
        UsageError, match="--profile and --hosts exclude each other; --keep is for engines on this machine"
    ):
        magic_commands.start(given)
    given = Namespace(**vars(given) | {"profile": None, "hosts": None, "keep": False})
    with pytest.raises(UsageError, match="--python goes with --hosts"):
        magic_commands.start(given)


def test_a_debugger_on_another_host_is_reached_through_ssh(monkeypatch, capsys):
    """It listens on the loopback of that host."""
    hosts = {0: socket.gethostname(), 1: "gpu07"}

    def ask(rank, operation, *_):
        return RankActivity(host=hosts[rank]) if operation == "activity" else 5678 + rank

    monkeypatch.setattr(magic_commands.cluster, "current", lambda: Namespace(num_engines=2, ask=ask))
    magic_commands.debug(Namespace(ranks="0-1"))
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines if line.startswith("rank")] == ["0", "1", "1"]
    assert lines[2].endswith("is on gpu07: forward the port before, ssh -N -L 5679:127.0.0.1:5679 gpu07")
