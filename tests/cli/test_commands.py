import subprocess
import sys
from pathlib import Path

import pytest

import shardyard.cli as shardyard_cli
from tests.cli.invocation import Shell, invoke


@pytest.fixture
def shell(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Shell:
    return Shell(monkeypatch, capsys)


def test_place_prints_key_and_partition(shell: Shell) -> None:
    rows = shell.json("place", "ch_general", "ch_dev", "--partitioner", "jump", "--partitions", "256")
    assert rows == [{"key": "ch_general", "partition": 25}, {"key": "ch_dev", "partition": 40}]


def test_place_reads_keys_from_standard_input(shell: Shell) -> None:
    arguments = ("--hash", "fnv1a32", "--partitioner", "modulus", "--partitions", "12")
    given = shell.json("place", "alice", "bob", *arguments)
    assert shell.json("place", "-", *arguments, stdin=b"alice\nbob\n") == given


def test_place_splits_lines_only_at_newlines_not_at_other_unicode_line_breaks(shell: Shell) -> None:
    rows = shell.json("place", "-", stdin="a\u2028b\x0bc\n\nd\n".encode())
    assert [row["key"] for row in rows] == ["a\u2028b\x0bc", "", "d"]
    assert shell.json("place", "-") == []


def test_place_takes_numbers_and_hex(shell: Shell) -> None:
    by_number = shell.json("place", "258", str(2**64 - 1), "--type", "int", "--partitions", "1000")
    by_bytes = shell.json("place", "0201000000000000", "f" * 16, "--type", "hex", "--partitions", "1000")
    assert [row["partition"] for row in by_number] == [row["partition"] for row in by_bytes]


def test_without_json_a_pipe_gets_a_tab_separated_table(shell: Shell) -> None:
    table = shell("place", "ch_general", "--partitioner", "jump", "--partitions", "256")
    assert table == "key\tpartition\nch_general\t25\n"


def test_check_prints_all_its_metrics_and_draws_a_plot(shell: Shell, tmp_path: Path) -> None:
    plot = tmp_path / "load.png"
    row = shell.json("check", "--hash", "fnv1a32", "--keys", "1000000", "--partitions", "100", "--plot", str(plot))
    fields = "hash partitions keys ids total_deviation max_deviation max_over_mean chi2_per_df p_value gini seconds"
    assert list(row) == fields.split()
    assert (row["hash"], row["partitions"], row["keys"], row["ids"]) == ("fnv1a32", 100, 1_000_000, "dense")
    assert 0 < row["max_deviation"] < row["total_deviation"]
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_compare_partitions_shows_every_partitioner(shell: Shell) -> None:
    rows = {row["name"]: row for row in shell.json("compare", "--partitions", "12", "--to", "13", "--keys", "100000")}
    assert list(rows) == ["modulus", "jump", "round_robin"]
    assert list(rows["jump"]) == ["name", "moved", "total", "fraction", "ideal_fraction", "min_size", "max_size"]
    assert rows["modulus"]["fraction"] == pytest.approx(12 / 13, abs=0.01)
    assert rows["jump"]["fraction"] == pytest.approx(rows["jump"]["ideal_fraction"], abs=0.01)


def test_compare_members_shows_every_assignor(shell: Shell) -> None:
    rows = {
        row["name"]: (row["moved"], row["min_size"], row["max_size"])
        for row in shell.json("compare", "--partitions", "256", "--members", "16", "--to-members", "17")
    }
    assert rows == {
        "sticky": (15, 15, 16),
        "even": (240, 15, 16),
        "contiguous": (120, 15, 16),
        "least_loaded": (0, 0, 16),
    }


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("place a --hash md5", "hash is 'md5': expected one of fnv1a32"),
        ("place a --hash [/]", "hash is '[/]': expected one of fnv1a32"),
        ("place a --hash [red]", "hash is '[red]': expected one of fnv1a32"),
        ("place \udcff", "expected text that UTF-8 can hold"),
        ("check --keys 10 --partitions 2147483647", "partitions is 2147483647: expected at most 10000000"),
        ("check --keys 10 --plot /proc/load.png", "expected a file that can be written"),
        ("place a --partitions 0", "partitions is 0: expected a whole number of at least 1"),
        ("place a --partitions 2.5", "'2.5': expected an integer"),
        ("place a --partitioner ring", "partitioner is 'ring': expected one of modulus, jump, round_robin"),
        ("place a --partitioner jump --hash fnv1a32", "hash is 'fnv1a32': expected a 64-bit hash for jump"),
        ("place a --type int", "key is 'a': expected an integer, for --type int"),
        ("place abc --type hex", "key is 'abc': expected pairs of hex digits"),
        ("place 99999999999999999999 --type int", "expected a whole number from -2**63 up to 2**64"),
        ("place --type int -- -99999999999999999999", "expected a whole number from -2**63 up to 2**64"),
        ("place", "Missing argument"),
        ("check --keys 0", "keys is 0: expected a whole number of at least 1"),
        ("check --keys 10 --ids random", "ids is 'random': expected one of dense, strided"),
        ("check --keys 10 --partitions -3", "partitions is -3"),
        ("check --keys 10 --plot load.bmp", "expected a file name that ends in .png"),
        ("check --keys 10 --plot nowhere/load.png", "expected a file in a folder that exists"),
        ("demo --members 0", "members is 0"),
        ("demo --members 2 --partitions 1000", "at most 64, with at most 64 partitions each"),
        ("compare --partitions 12", "expected either --to, or --members and --to-members"),
        ("compare --partitions 12 --to 13 --members 2", "expected either --to, or --members and --to-members"),
        (
            "compare --partitions 1000000000 --members 2 --to-members 4",
            "partitions is 1000000000: expected at most 1000000",
        ),
        ("compare --partitions 12 --to 2147483647", "partitions is 2147483647: expected at most 1000000"),
        ("check --keys 99999999999999999999999", "keys is 99999999999999999999999: expected at most"),
        ("compare --partitions 12 --to 0", "partitions is 0"),
        ("compare --partitions 12 --members 0 --to-members 2", "members is 0"),
        ("compare --partitions 12 --members 2 --to-members 2.5", "'2.5': expected an integer"),
    ],
)
def test_an_invalid_call_gets_one_clear_error_exit_code_2_and_no_output(
    arguments: str, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code = invoke(monkeypatch, *arguments.split())
    printed = capsys.readouterr()
    assert (code, printed.out) == (2, "")
    assert message in " ".join(printed.err.replace("│", " ").split())


def test_the_demo_moves_the_fewest_partitions_and_loses_nothing(shell: Shell) -> None:
    demo = shell.json("demo", "--partitions", "12", "--members", "3")
    assert [stage["partitions each"] for stage in demo["stages"]] == ["4 4 4", "3 3 3 3", "4 4 4"]
    assert [stage["moved"] for stage in demo["stages"]] == [0, 3, 3]
    summary = demo["summary"]
    assert summary["delivered"] == summary["sent"] > 1000
    assert (summary["lost"], summary["twice"], summary["out_of_order"]) == (0, 0, 0)


@pytest.mark.parametrize("command", ["place", "check", "compare", "demo"])
def test_help_has_examples(shell: Shell, command: str) -> None:
    assert f"shardyard {command} " in shell(command, "--help")


@pytest.mark.processes
def test_the_command_can_be_run_as_a_file_as_spark_submit_does(tmp_path: Path) -> None:
    command = [sys.executable, shardyard_cli.__path__[0] + "/__main__.py", "place", "ch_general", "--partitions", "12"]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (run.returncode, run.stderr) == (0, "")


@pytest.mark.spark
@pytest.mark.timeout(300)
def test_the_tour_shows_the_result_of_each_step(tmp_path: Path) -> None:
    command = [str(Path(sys.executable).with_name("shardyard")), "tour"]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    for result in (
        "ch_general\t25",
        "total_deviation\t53634",
        "contiguous\t120",
        " 0 lost, 0 duplicated, 0 out of order",
    ):
        assert result in run.stdout
