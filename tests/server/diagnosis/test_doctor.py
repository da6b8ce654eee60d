"""`python -m kvplug.router doctor` as a user runs it."""

import asyncio
import sys

import pytest

from kvplug.server.diagnosis.doctor import main
from tests.plain_kernels import with_plain_kernels
from tests.server.diagnosis.test_board import SOUND_VLLM, vllm
from tests.server.diagnosis.test_facts import METRICS
from tests.server.engine import served
from tests.server.kvplug_publisher import publishing
from tests.server.test_service import routing
from tests.waiting import until


@pytest.fixture
def doctor(monkeypatch, capsys):
    """(exit code, stdout, stderr) of arguments, in this process: an interpreter takes a second."""
    monkeypatch.setenv("COLUMNS", "200")

    async def run(*arguments):
        try:
            code = await asyncio.to_thread(main, arguments)
        except SystemExit as stopped:
            code = stopped.code
        return (code, *capsys.readouterr())

    return run


async def doctor_process(*arguments):
    """As `doctor`, in a process of its own."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "kvplug.router", "doctor", *arguments),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=with_plain_kernels(COLUMNS="200"),
    )
    out, err = await process.communicate()
    return process.returncode, out.decode(), err.decode()


@pytest.mark.slow
async def test_findings_of_a_running_router_are_a_table_and_exit_code_1():
    async with routing(vllm(metrics=METRICS)) as (service, _):
        await until(lambda: len(service.diagnosis.look()) == 2, "the block size is found")
        code, out, err = await doctor_process("--url", service.url)
        [url] = service.fleet.workers
    assert (code, err) == (1, "")
    assert out.splitlines()[:5] == [
        url,
        "  block_size",
        "    expected  blocks of 4 tokens",
        "    seen      32",
        "    fix       start the router with --block-size 32, or the engine with --block-size 4",
    ]
    assert "  no_event_endpoint\n" in out


async def test_workers_can_be_asked_without_a_router(doctor):
    engine = vllm(kv_event_sources={})
    async with served(engine) as url:
        code, out, err = await doctor("--worker", url, "--block-size", "4")
        assert (code, err) == (1, "")
        assert "events_off" in out
        assert "block_size" not in out
        code, out, _ = await doctor("--worker", "http://127.0.0.1:9", "--block-size", "4")
        assert (code, "worker_down" in out) == (1, True)


async def test_an_engine_that_demands_a_key_can_be_asked(doctor, tmp_path):
    engine, key_file = vllm(kv_event_sources={}), tmp_path / "key"
    engine.api_key = "secret"
    key_file.write_text("secret\n")
    async with served(engine) as url:
        _, out, _ = await doctor("--worker", url)
        assert "worker_down" in out
        _, out, _ = await doctor("--worker", url, "--worker-api-key-file", str(key_file))
        assert "worker_down" not in out
        assert "events_off" in out


async def test_a_block_size_that_nobody_has_named_yet_is_no_finding(doctor):
    async with served(vllm(kv_event_sources={}, metrics=METRICS)) as url:
        _, out, _ = await doctor("--worker", url)
    assert "block_size" not in out


async def test_a_sound_fleet_is_exit_code_0(doctor, publisher):
    engine = vllm()
    engine.says = SOUND_VLLM
    async with served(engine) as url:
        worker = f"{url},events={publisher.endpoint},replay={publisher.endpoint}"
        code, out, err = await doctor("--worker", worker, "--block-size", "4")
    assert (code, err) == (0, "")
    assert out.splitlines() == ["nothing found", "event streams", f"  {url}   silent   stale"]


async def test_an_engine_may_be_named_by_its_event_endpoint(doctor):
    engine = vllm()
    async with served(engine) as url:
        with publishing(
            url=url, engine="vllm", engine_version="0.32.0", capacity_blocks=9
        ) as stream:
            _, out, err = await doctor("--worker", stream.endpoint)
    assert err == ""
    assert "worker_unknown" not in out
    *_, line = out.splitlines()
    assert line == f"  {stream.endpoint}   kvplug 1   exact   vllm 0.32.0, 9 blocks of 4"


@pytest.mark.parametrize("answer", [None, b"<html>", {"status": "ok"}])
async def test_nobody_to_ask_is_exit_code_2(doctor, answer):
    engine = vllm()
    async with served(engine) as url:
        if answer is None:
            url = "http://127.0.0.1:9"
        code, out, err = await doctor("--url", url)
    assert (code, out) == (2, "")
    assert err.startswith(f"doctor: no answer from a router at {url}: ")


async def test_wrong_arguments_are_exit_code_2_with_a_sentence(doctor):
    code, _, err = await doctor("--worker", "nonsense")
    assert code == 2
    assert "no http URL" in err


async def test_the_workers_of_a_file_of_settings_are_asked_as_the_router_would(doctor, tmp_path):
    engine, file = vllm(kv_event_sources={}), tmp_path / "kvplug.yaml"
    (tmp_path / "key").write_text("secret\n")
    engine.api_key = "secret"
    async with served(engine) as url:
        file.write_text(
            f"workers: [{url}]\nworker_api_key_file: {tmp_path / 'key'}\n"
            f"tokenizers: ['other={tmp_path}']\nrouter:\n  mode: kv\n"
        )
        code, out, err = await doctor("--config", str(file))
        assert (code, err) == (1, "")
        assert "events_off" in out
        assert "worker_down" not in out
        (tmp_path / "wrong").write_text("no\n")
        _, out, _ = await doctor(
            "--config", str(file), "--worker-api-key-file", str(tmp_path / "wrong")
        )
        assert "worker_down" in out  # flags overrule the file
    code, _, err = await doctor("--config", str(file), "--url", "http://127.0.0.1:9")
    assert (code, err[:50]) == (2, "doctor: no answer from a router at http://127.0.0.")


async def test_what_is_wrong_in_a_file_of_settings_is_named_with_its_line(doctor, tmp_path):
    file = tmp_path / "kvplug.yaml"
    file.write_text("port: 1\nworkers: [nonsense]\n")
    code, _, err = await doctor("--config", str(file))
    assert code == 2
    assert f"{file}:2: " in err
    file.write_text(f"workers: ['http://a:1']\ntokenizers: ['{tmp_path / 'none'}']\n")
    code, _, err = await doctor("--config", str(file))
    assert (code, f"{file}:2: " in err) == (2, True)


async def test_a_tokenizer_may_be_of_one_model(doctor, tmp_path):
    async with served(vllm(kv_event_sources={})) as url:
        given = ("--worker", url, "--tokenizer", f"m={tmp_path}", "--tokenizer", str(tmp_path))
        code, _, err = await doctor(*given)
        assert (code, err) == (1, "")
        code, _, err = await doctor(*given, "--tokenizer", f"m={tmp_path}")
    assert (code, "has two" in err) == (2, True)
