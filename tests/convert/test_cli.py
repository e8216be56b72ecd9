"""The command itself: exit codes, one line for an error, output for machines, full-size memory."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from chord_convert.against import compare
from chord_convert.bench import write_layers
from chord_convert.cli import _parse_ranks, cli
from chord_runtime.errors import UsageError
from chord_runtime.format.layout import MANIFEST
from tests.checkpoints import write_checkpoint
from tests.convert.helpers import snapshot

COMMAND = [sys.executable, "-m", "chord_convert"]


def convert(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *map(str, arguments)], capture_output=True, text=True, timeout=300, check=False)


def test_a_conversion(model: Path, packed: Path, tmp_path: Path) -> None:
    result = convert(model, "--ep", "2", "-o", tmp_path / "out")
    assert (result.returncode, result.stderr) == (0, "")
    assert "finished" in result.stdout
    assert snapshot(tmp_path / "out") == snapshot(packed)


def test_dry_run_writes_nothing(model: Path, tmp_path: Path) -> None:
    result = convert(model, "--ep", "2", "--tp", "2", "-o", tmp_path / "out", "--dry-run", "--json")
    plan = json.loads(result.stdout)
    assert plan["packing"]["tp_size"] == 2
    assert plan["free_bytes"] > 0
    assert not (tmp_path / "out").exists()
    assert "ep 2 × tp 2" in convert(model, "--ep", "2", "--tp", "2", "--dry-run").stdout


def test_logs_for_machines(model: Path, tmp_path: Path) -> None:
    result = convert(model, "--ep", "2", "-o", tmp_path / "out", "--log-json", "--json")
    events = [json.loads(line) for line in result.stderr.splitlines()]
    kinds = [event["event"] for event in events]
    assert kinds[0] == "start"
    assert kinds[-1] == "end"
    assert kinds.count("file") == 5
    told = json.loads(result.stdout)
    assert told["missing_files"] == 0
    assert told["written_bytes"] == told["write_bytes"] == sum(told["files"].values())


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ([], 2, "error: say how the experts will be divided"),
        (["--ep", "3"], 2, "error: ep size 3 does not divide 8 experts"),
        (["--ep", "0"], 2, "Invalid value for '--ep'"),
        (["--ep", "2", "--mode", "sideways"], 2, "Invalid value for '--mode'"),
        (["--ep", "2", "--ranks", "5"], 2, "error: --ranks 5: with --ep 2 ranks are 0..1"),
        (["--ep", "2", "--ranks", "0-9999999999"], 2, "error: --ranks 9999999999: with --ep 2 ranks are 0..1"),
        (["--ep", "2", "--ranks", "1-0"], 2, "error: --ranks 1-0"),
        (["--ep", "2", "--ranks", ""], 2, "error: --ranks : found ''"),
        (["--ep", "2", "--revision", "v2"], 2, "error: --revision goes with a Hub id"),
        (["--ep", "2", "-o", ""], 2, "error: -o: found an empty name"),
        (["--ep", "2", "--part", "2/2"], 2, "error: --part"),
        (["--ep", "2", "--address", "auto"], 2, "error: --address goes with --executor ray"),
        (["--unknown"], 2, "No such option"),
    ],
)
def test_wrong_usage(model: Path, tmp_path: Path, arguments: list[str], code: int, message: str) -> None:
    result = convert(model, "-o", tmp_path / "out", *arguments)
    assert (result.returncode, message in result.stderr) == (code, True), result.stderr
    assert "Traceback" not in result.stderr
    assert not (tmp_path / "out").exists()


def test_a_checkpoint_that_is_refused(tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    config["quantization_config"]["config_groups"]["group_0"]["weights"]["group_size"] = 128
    (model / "config.json").write_text(json.dumps(config))
    result = convert(model, "--ep", "2", "-o", tmp_path / "out")
    assert result.returncode == 1
    assert result.stderr.startswith("error: ")
    assert "group_size" in result.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no/such/model", "no/such/model: neither a directory nor a Hub id"),
        ("nonexist", "nonexist: neither a directory nor a Hub id"),
        ("", "an empty name: neither a directory nor a Hub id"),
        (__file__, "found a file; supported: the checkpoint's directory"),
    ],
)
def test_neither_directory_nor_hub_id(tmp_path: Path, name: str, message: str) -> None:
    result = convert(name, "--ep", "2", "-o", tmp_path / "out")
    assert (result.returncode, message in result.stderr) == (2, True), result.stderr


@pytest.mark.parametrize(
    ("arguments", "code"), [(["--ep", "3"], 2), (["--unknown"], 2), (["--ep", "2", "-o", __file__], 1)]
)
def test_errors_for_machines(model: Path, tmp_path: Path, arguments: list[str], code: int) -> None:
    result = convert(model, "-o", tmp_path / "out", *arguments, "--json")
    assert (result.returncode, result.stderr) == (code, "")
    told = json.loads(result.stdout)
    assert told["exit_code"] == code
    assert told["error"]


@pytest.mark.parametrize("form", [[], ["--json"]])
def test_a_full_stdout(model: Path, tmp_path: Path, form: list[str]) -> None:
    command = [*COMMAND, str(model), "--ep", "2", "-o", str(tmp_path / "out"), *form]
    with Path("/dev/full").open("w") as full:
        result = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    assert result.returncode == 1
    assert result.stderr == "error: stdout cannot be written: No space left on device\n"


def test_ray_is_looked_for_before_anything_is_made(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UsageError, match="needs Ray"):
        cli.main([str(model), "--ep", "2", "-o", str(tmp_path / "out"), "--executor", "ray"], standalone_mode=False)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("number", "code", "message"), [(signal.SIGINT, 130, "stopped"), (signal.SIGTERM, 143, "terminated")]
)
def test_ctrl_c_and_sigterm(larger: Path, tmp_path: Path, number: int, code: int, message: str) -> None:
    model, output = larger, tmp_path / "out"
    command = [*COMMAND, str(model), "--ep", "8", "-o", str(output)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    while not list(output.glob("*.safetensors")):
        time.sleep(0.002)
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == code
    assert errors.lstrip() == f"error: {message}. The same command goes on from the files that are finished.\n"
    assert not list(output.glob("*.tmp"))
    assert not (output / MANIFEST).exists()
    assert convert(model, "--ep", "8", "-o", output).returncode == 0


_STUCK = """
import sys, time
from chord_convert import cli
from chord_convert.executors import threads

def stuck(*_):
    sys.stdout.write("at work\\n")
    sys.stdout.flush()
    time.sleep(30)

threads.run_task = stuck
cli.main()
"""


@pytest.mark.parametrize(
    ("number", "code", "message"), [(signal.SIGINT, 130, "stopped"), (signal.SIGTERM, 143, "terminated")]
)
def test_a_third_signal_ends_without_a_word(model: Path, tmp_path: Path, number: int, code: int, message: str) -> None:
    """The second is told at once; Python then waits for threads that are stuck in a read, until the third."""
    command = [sys.executable, "-c", _STUCK, str(model), "--ep", "2", "-o", str(tmp_path / "out")]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stderr is not None
    working = 0
    while working < 2:  # both workers
        working += process.stdout.readline() == "at work\n"
        assert process.poll() is None
    process.send_signal(number)
    time.sleep(0.3)
    assert process.poll() is None
    process.send_signal(number)
    while message not in (line := process.stderr.readline()):
        assert process.poll() is None
    assert line == f"error: {message}. The same command goes on from the files that are finished.\n"
    time.sleep(0.3)
    assert process.poll() is None
    process.send_signal(number)
    _, errors = process.communicate(timeout=10)
    assert (process.returncode, errors) == (code, "")


@pytest.mark.parametrize("module", ["chord_convert.cli", "chord_runtime.cli"])
def test_a_module_runs_as_its_script_does(module: str) -> None:
    done = subprocess.run([sys.executable, "-m", module, "--version"], capture_output=True, text=True, check=True)
    assert "version" in done.stdout
    wrong = subprocess.run([sys.executable, "-m", module, "--no-such"], capture_output=True, text=True, check=False)
    assert wrong.returncode == 2 and "--no-such" in wrong.stderr


def test_unfinished_is_told_from_failed(model: Path, tmp_path: Path) -> None:
    """A directory in place of a file that is to be written: an error in the middle, and gone on from afterwards."""
    blocked = tmp_path / "out" / "shared-00000.safetensors.tmp"
    blocked.mkdir(parents=True)
    result = convert(model, "--ep", "2", "-o", tmp_path / "out")
    assert result.returncode == 1
    blocked.rmdir()
    assert convert(model, "--ep", "2", "-o", tmp_path / "out", "--part", "1/2").returncode == 0
    blocked.mkdir()
    result = convert(model, "--ep", "2", "-o", tmp_path / "out", "--part", "0/2")
    assert result.returncode == 3
    assert "Is a directory; move that directory away\nUnfinished. The same command goes on" in result.stderr
    blocked.rmdir()
    assert convert(model, "--ep", "2", "-o", tmp_path / "out", "--part", "0/2").returncode == 0
    assert (tmp_path / "out" / MANIFEST).exists()


def test_help_is_quick_and_has_examples() -> None:
    result = convert("--help")
    assert "chord-convert moonshotai/Kimi-K2-Thinking --ep 8 --dry-run" in result.stdout
    assert "Exit codes" in result.stdout


@pytest.mark.parametrize(("text", "ranks"), [("0", (0,)), ("0,3-5", (0, 3, 4, 5)), ("2-3,1,2", (1, 2, 3))])
def test_ranks(text: str, ranks: tuple[int, ...]) -> None:
    assert _parse_ranks(text, 8) == ranks


@pytest.mark.parametrize("text", ["", "x", "1-", "-1", "3-1", "1,,2"])
def test_ranks_that_cannot_be(text: str) -> None:
    with pytest.raises(UsageError, match="--ranks"):
        _parse_ranks(text, 8)


def test_conversions_do_without_torch() -> None:
    """It would triple the start-up time and double the memory."""
    program = "import sys, chord_convert.cli, chord_convert.convert; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


@pytest.mark.slow
@pytest.mark.parametrize("tp", [1, 8])
def test_memory_stays_below_a_gigabyte_at_full_size(tmp_path: Path, tp: int) -> None:
    """Four workers on experts of full size; and what they write is the source, bit for bit."""
    write_layers(tmp_path / "model", layers=2, experts=8)
    report = "import atexit; atexit.register(lambda: print(open('/proc/self/status').read()))"
    watched = f"{report}; from chord_convert.cli import main; main()"
    options = ["--ep", "4", "--tp", str(tp), "--workers", "4", "-o", str(tmp_path / "out")]
    command = [sys.executable, "-c", watched, str(tmp_path / "model"), *options]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    (peak,) = [int(line.split()[1]) for line in result.stdout.splitlines() if line.startswith("VmHWM")]
    assert peak < 1 << 20
    assert peak < 300_000, "far more than the buffers need"
    assert compare(tmp_path / "out", str(tmp_path / "model")).findings == ()


@pytest.mark.slow
def test_benchmark_runs(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "chord_convert.bench", "--directory", str(tmp_path), "--gigabytes", "1"]
    result = subprocess.run([*command, "--runs", "1"], capture_output=True, text=True, timeout=300, check=True)
    assert "convert / cp = " in result.stdout
    assert "bound by" in result.stdout
    assert not list(tmp_path.iterdir())
