"""`python -m examples.demo`: exit codes, and nothing left behind when it is stopped."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from examples.demo.__main__ import main
from examples.launch.child_process import group_members
from tests.plugins.stock_client import wait_until

ROOT = Path(__file__).parents[2]

# The real command with a stand-in for the comparison: a child that stays, then what MODE says. Each
# line of its input, a mode and a folder, is a demo in a process of its own that has imported all
# already; the pid and the exit code are lines of its output.
STAND_IN = """
import asyncio, os, signal, sys, tempfile
from examples.demo import __main__, comparison
from examples.launch.child_process import ChildProcess
from examples.demo.client import Completed, Failed
from examples.launch.errors import LaunchError
from examples.demo.report import PolicyResult

while line := sys.stdin.readline():
    if (pid := os.fork()) == 0:
        break
    print(pid, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
else:
    sys.exit()
MODE, folder = line.split()
os.chdir(folder)  # where the plot goes
tempfile.tempdir = folder
for number, name in (1, "stdout"), (2, "stderr"):
    os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT), number)

def stand_in(kind, num_requests, *, log_dir, console, cleanup):
    child = ChildProcess("child", ["sleep", "600"], log_path=log_dir / "child.log")
    cleanup.enter_context(child)
    group_id = os.getpgid(child.members()[0])
    if MODE == "block":
        with comparison.progress_bar(console, "waiting", 1):
            print(group_id, log_dir, flush=True)
            signal.pause()
    if MODE == "asyncio":
        asyncio.run(wait_for_ever(group_id, log_dir))
    print(group_id, log_dir, flush=True)
    if MODE == "fail":
        raise LaunchError("vllm-0 ended with status 1; its log is somewhere")
    outcome = Completed(0.1, 0.2, 64, 32) if MODE == "answered" else Failed("status 503")
    return [PolicyResult(policy, [outcome], 1.0) for policy in comparison.POLICIES]

async def wait_for_ever(group_id, log_dir):
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(asyncio.sleep(600))
        print(group_id, log_dir, flush=True)

comparison.run = stand_in
sys.exit(__main__.main(["--requests", "1"]))
"""


class Demo:
    """The stand-in, running."""

    def __init__(self, stand_in, mode, folder):
        self._stand_in, self._folder, self._has_ended = stand_in, folder, False
        stand_in.stdin.write(f"{mode} {folder}\n")
        stand_in.stdin.flush()
        self.pid = int(stand_in.stdout.readline())

    def wait_started(self):
        wait_until(lambda: self._said("stdout").endswith("\n"), "it has started")
        group_id, log_dir = self._said("stdout").splitlines()[0].split()
        self.group_id, self.log_dir = int(group_id), Path(log_dir)

    def _said(self, name):
        path = self._folder / name
        return path.read_text() if path.exists() else ""

    def end(self):
        """The exit code and what was said on standard error."""
        code = int(self._stand_in.stdout.readline())
        self._has_ended = True
        return code, self._said("stderr")

    def kill(self):
        if not self._has_ended:
            os.kill(self.pid, signal.SIGKILL)
            self.end()


@pytest.fixture(scope="module")
def stand_in():
    """To import the command takes longer than all that it does here: one process for all demos."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen([sys.executable, "-c", STAND_IN], **pipes, env=environment) as process:
        yield process
        process.kill()


@pytest.fixture
def run_demo(stand_in, tmp_path):
    demos = []

    def run(mode):
        demos.append(Demo(stand_in, mode, tmp_path))
        demos[-1].wait_started()
        return demos[-1]

    yield run
    for demo in demos:
        demo.kill()


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["block", "asyncio"])
@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_stops_everything(run_demo, mode, signum, code):
    demo = run_demo(mode)
    assert group_members(demo.group_id)
    os.kill(demo.pid, signum)
    assert demo.end() == (code, f"stopped by {signum.name}\n")
    assert group_members(demo.group_id) == []
    assert not demo.log_dir.exists()


@pytest.mark.slow
def test_a_failure_is_one_sentence(run_demo):
    demo = run_demo("fail")
    sentence = "the demo cannot go on: vllm-0 ended with status 1; its log is somewhere\n"
    assert demo.end() == (1, sentence)
    assert group_members(demo.group_id) == []
    assert demo.log_dir.exists()


@pytest.mark.slow
def test_unanswered_requests_are_a_failure(run_demo):
    demo = run_demo("unanswered")
    code, said = demo.end()
    assert code == 1
    assert f"the logs are in {demo.log_dir}" in said


@pytest.mark.slow
def test_success_leaves_nothing(run_demo):
    demo = run_demo("answered")
    assert demo.end() == (0, "")
    assert group_members(demo.group_id) == []
    assert not demo.log_dir.exists()


@pytest.mark.parametrize(
    "flags",
    [["--engine", "no-such"], ["--requests", "0"], ["--requests", "ten"], ["--no-such-flag"]],
)
def test_a_wrong_flag_is_rejected(flags):
    command = [sys.executable, "-m", "examples.demo", *flags]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert result.returncode == 2
    assert "usage:" in result.stderr


def test_help_is_given(capsys):
    with pytest.raises(SystemExit) as exit_:
        main(["--help"])
    assert exit_.value.code == 0
    assert "--engine" in capsys.readouterr().out
