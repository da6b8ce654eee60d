"""A child process and all that it starts: stopped, killed, and never left behind."""

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from examples.launch.child_process import ChildProcess, group_members, poll_until
from examples.launch.errors import LaunchError

# Starts a grandchild that ignores SIGTERM, says so, and then behaves as its argument tells.
FAMILY = """
import signal, subprocess, sys
stubborn = (
    "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
    "print('up', flush=True); signal.pause()"
)
grandchild = subprocess.Popen([sys.executable, "-c", stubborn], stdout=subprocess.PIPE)
grandchild.stdout.readline()
print("ready", flush=True)
if sys.argv[1] == "stay":
    signal.pause()
sys.exit(7)
"""


@pytest.fixture
def family(tmp_path):
    processes = []

    def make(*, behaviour="stay"):
        command = [sys.executable, "-c", FAMILY, behaviour]
        process = ChildProcess("family", command, log_path=tmp_path / "logs" / "family.log")
        processes.append(process)
        return process

    yield make
    for process in processes:
        process.kill()


def started(process):
    process.start()
    assert poll_until(lambda: "ready" in process.log_tail(), timeout_s=20)
    return process


def test_kill_ends_grandchildren_too(family):
    process = started(family())
    members = process.members()
    assert len(members) == 3  # the lifeline, the command, its child
    process.kill()
    assert not any(os.path.exists(f"/proc/{pid}") for pid in members[:1])
    assert process.members() == []
    assert process.exit_status == -signal.SIGKILL


def test_a_process_that_ends_while_a_group_is_listed_is_left_out(family, monkeypatch):
    """Linux answers ESRCH, not ENOENT, for the files of a process that is just going."""
    group_id = started(family()).members()[0]
    ask = os.stat

    def stat(path, *arguments, **named):
        if str(path).startswith("/proc/") and str(path).endswith("/stat"):
            raise ProcessLookupError(3, "No such process", str(path))
        return ask(path, *arguments, **named)

    monkeypatch.setattr(os, "stat", stat)
    assert len(group_members(group_id)) == 3


def test_stop_kills_what_does_not_listen(family):
    process = started(family())
    group_id = process.members()[0]
    process.stop(limit_s=0.2)
    assert group_members(group_id) == []


def test_stop_asks_first(tmp_path):
    polite = (
        "import signal, sys\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(print('bye')))\n"
        "print('ready', flush=True)\nsignal.pause()"
    )
    process = ChildProcess("polite", [sys.executable, "-c", polite], log_path=tmp_path / "log")
    started(process).stop(limit_s=20)
    assert process.log_tail() == "ready\nbye"
    assert process.exit_status == 0


def test_what_a_dead_command_leaves_is_stopped(family):
    process = started(family(behaviour="leave"))
    assert poll_until(lambda: process.exit_status == 7, timeout_s=20)
    assert len(process.members()) == 1
    process.stop(limit_s=0.2)
    assert process.members() == []
    assert process.exit_status == 7


def test_it_can_start_again_and_the_log_goes_on(family):
    process = started(family())
    with pytest.raises(LaunchError, match="already running"):
        process.start()
    process.kill()
    process.start()
    assert poll_until(lambda: process.log_tail().count("ready") == 2, timeout_s=20)


def test_stop_and_kill_of_nothing_do_nothing(family):
    process = family()
    process.stop()
    process.kill()
    assert process.exit_status is None


def test_waiting_ends_with_the_command(family):
    process = family(behaviour="leave")
    process.start()
    with pytest.raises(
        LaunchError, match=r"ended with status 7 before it could sing; its log is"
    ) as e:
        process.wait_until(lambda: False, "sing", timeout_s=20)
    assert "ready" in e.value.__notes__[0]


def test_waiting_has_a_limit(family):
    process = started(family())
    with pytest.raises(LaunchError, match="took longer than 0 s to sing"):
        process.wait_until(lambda: False, "sing", timeout_s=0.1)


def test_run_raises_unless_all_went_well(family, tmp_path):
    ChildProcess("fine", ["true"], log_path=tmp_path / "log").run(timeout_s=20)
    with pytest.raises(LaunchError, match="family failed with status 7"):
        family(behaviour="leave").run(timeout_s=20)
    with pytest.raises(LaunchError, match="failed with status 127"):
        ChildProcess("gone", ["/no/such/command"], log_path=tmp_path / "log").run(timeout_s=20)


@pytest.mark.parametrize("end", [ChildProcess.kill, ChildProcess.stop])
def test_temporary_files_of_a_command_go_with_it(tmp_path, end):
    littering = (
        "import signal, tempfile\n"
        "print(tempfile.mkstemp()[1])\nprint('ready', flush=True)\nsignal.pause()"
    )
    process = ChildProcess("litter", [sys.executable, "-c", littering], log_path=tmp_path / "log")
    file = Path(started(process).log_tail().splitlines()[0])
    assert file.exists()
    end(process)
    assert not file.parent.exists()


def test_children_do_not_outlive_a_killed_parent(tmp_path):
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    log_path = tmp_path / "family.log"
    parent = f"""
        import signal
        from pathlib import Path
        from examples.launch.child_process import ChildProcess, poll_until
        child = ChildProcess("family", {[sys.executable, "-c", FAMILY, "stay"]!r},
                             log_path=Path({str(log_path)!r}))
        child.start()
        assert poll_until(lambda: "ready" in child.log_tail(), timeout_s=20)
        print(child.members()[0], flush=True)
        signal.pause()
    """
    command = [sys.executable, "-c", textwrap.dedent(parent)]
    environ = {**os.environ, "TMPDIR": str(scratch)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environ) as process:
        member = int(process.stdout.readline())
        group_id = os.getpgid(member)
        assert len(group_members(group_id)) == 3
        process.kill()
        assert poll_until(lambda: group_members(group_id) == [], timeout_s=20)
    assert list(scratch.iterdir()) == []
